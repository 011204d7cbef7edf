"""The bundled model: a small trained DiffusionGemma, its tokenizer, problems and trainer."""

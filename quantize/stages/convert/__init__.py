"""The stage convert: reads BF16 shards and writes compressed-tensors shards."""

"""Examples at the end of each command's --help; RUN stands for a folder that `quantize run` made."""

import click

REAL = "--model google/diffusiongemma-26B-A4B-it"
EXAMPLES = {
    "run": (
        "run --recipe nvfp4", "run --recipe mine.yaml --limit 80", f"run --recipe nvfp4 {REAL} --resume"
    ),
    "rehearse": (f"rehearse --recipe nvfp4 {REAL}",),
    "status": ("status outputs/nvfp4-0123abc",),
    "plan": (
        "plan --recipe mine.yaml --limit 80", f"plan {REAL} --gpu h100", "plan --serve --gpu rtx4090"
    ),
    "calibrate": ("calibrate RUN",),
    "round": ("round RUN",),
    "convert": ("convert RUN",),
    "verify": ("verify RUN --full",),
    "fidelity": ("fidelity RUN --activations none",),
    "evaluate": (
        "evaluate RUN --all", "evaluate RUN --activations none --noise-floor", "evaluate RUN --steps 10"
    ),
    "report": ("report RUN --hourly-price 3",),
    "recipes": ("recipes", "recipes nvfp4 > mine.yaml"),
    "tasks": ("tasks", "tasks --recipe mine.yaml"),
    "inspect": ("inspect RUN/checkpoint",),
    "measure": (f"measure {REAL.split()[1]}", "measure bundled --prompts 2 --canvases 1"),
    "doctor": ("doctor",),
    "judge": (
        "judge FOLDER --recipe fp8_dynamic",
        f"judge ORG/NAME --against {REAL.split()[1]} --recipe nvfp4",
    ),
    "compare": ("compare outputs/nvfp4-0123abc outputs/fp8_dynamic-4567def",),
    "baseline export": ("baseline export RUN bf16.jsonl.gz",),
    "baseline import": ("baseline import bf16.jsonl.gz --out outputs",),
    "baseline push": ("baseline push bf16.jsonl.gz ORG/NAME",),
    "baseline pull": ("baseline pull ORG/NAME@COMMIT",),
    "baseline check": ("baseline check RUN --answers 40",),
    "search": ("search nvfp4 --bytes 5e6", f"search nvfp4 {REAL} --bytes 17e9"),
    "generate": ('generate bundled "Tom has 9 pens. Tom loses 4. How many pens are left?"',),
    "tune": ("tune",),
    "export": ("export RUN --to gguf model.gguf",),
    "adopt": (
        "evaluate RUN --steps 10 --steps 20", "report RUN", "adopt RUN", "adopt RUN t20",
        "adopt RUN --own",
    ),
    "card": ("card RUN --repo ORG/NAME",),
    "bundle": ("bundle RUN --out for-the-issue.zip",),
    "push": ("push RUN --repo ORG/NAME --dry-run", "push RUN --repo ORG/NAME --to main --tag v1 --yes"),
    "verify-signature": ("verify-signature FOLDER --key public.pem",),
}  # fmt: skip


def with_examples(command: click.Command, name: str) -> click.Command:
    """Give a command, and those of a group, its examples as the end of its help; return it."""
    if isinstance(command, click.Group):
        for word, inner in command.commands.items():
            with_examples(inner, f"{name} {word}")
    elif lines := EXAMPLES.get(name):
        title = "Examples:" if len(lines) > 1 else "Example:"
        command.epilog = "\n".join(["\b", title, *(f"  quantize {line}" for line in lines)])
    return command

"""The folder of one run, with each stage's result; a stage is done when its result exists."""

from pathlib import Path

from quantize.errors import InputError

README, RESULTS = "README.md", ".eval_results"  # the model card, beside the checkpoint it describes
SHARED = ".bf16"  # beside the runs: what they share of one BF16 model
EARLIER = "evaluation-earlier"  # scores that were replaced by scores under other conditions


class RunDir:
    """The paths of all files and folders that a run's folder may hold."""

    def __init__(self, path: Path) -> None:
        self.path = path = Path(path)
        self.recipe_yaml = path / "recipe.yaml"  # resolved, with every default
        self.manifest_json = path / "manifest.json"  # versions, hardware, seconds, peak memory
        self.stages_json = path / "stages.json"  # digests of each stage's result and inputs
        self.lock = path / ".lock"  # held by the process that works on the run
        self.command = path / ".command"  # the command line that continues the run
        self.progress_json = path / ".progress.json"  # for `quantize status`, while a process works
        self.targets_csv = path / "targets.csv"  # per source tensor: scheme or reason, bytes
        self.calibration = path / "calibration"  # input scales, expert coverage, trajectories
        self.rounding = path / "rounding"  # codes and scales that GPTQ found, one file per layer
        self.checkpoint = path / "checkpoint"  # the quantized checkpoint, ready for the Hub
        self.conversion_json = path / "conversion.json"  # checksums of the checkpoint's files
        self.witness_json = path / "conversion.checks.json"  # convert's checks of what it encoded
        self.verification_json = path / "verification.json"  # findings of the static checks
        self.fidelity_json = path / "fidelity.json"  # distance from BF16 on trajectories
        self.evaluation = path / "evaluation"  # scored samples: {bf16,quantized}/<task>.jsonl
        self.spot_check_json = path / "spot-check.json"  # of an imported baseline
        self.report_json = path / "report.json"  # all that the reports show, and the verdict
        self.report_md, self.report_html = path / "report.md", path / "report.html"
        self.junit_xml = path / "junit.xml"  # the gate's results for a CI system
        self.log = path / "run.log"  # tracebacks of unexpected errors

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"


def existing_run(path: Path) -> RunDir:
    """Return the folder of a run; raise InputError if there is no folder, or no run in it."""
    folder = RunDir(path)
    if not folder.manifest_json.exists():
        what = "no manifest.json there" if folder.path.is_dir() else "no such folder"
        raise InputError(f"{path}: {what}; name a folder that `quantize run` made: outputs/...")
    return folder


def continued_by(run: RunDir, otherwise: str) -> str:
    """Return the command line that continues a run; `otherwise` if none is noted in its folder."""
    return run.command.read_text("utf-8") if run.command.is_file() else otherwise


def is_card(name: str) -> bool:
    """Return whether a file in a checkpoint is the card or scores, which convert does not write."""
    return name == README or name.startswith(f"{RESULTS}/")

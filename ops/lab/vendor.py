"""``make vendor``: fetches the vendored files of npm packages that manifests list.

A manifest is a JSON list next to the files: ``{"file", "package", "version", "licence", "member", "sha256"}``, where
``member`` is the path inside of the package. To update a version, change it there and run this; the digests are
updated. Only this command needs npm and a registry.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

MANIFESTS = (
    "ops/dashboard/static/vendor/manifest.json",
    "ops/lab/site/vendor/manifest.json",
    "tests/e2e/dashboard/vendor/manifest.json",
)


def renew(manifest: Path) -> None:
    """Fetch each file of a manifest and write down its digest."""
    entries: list[dict[str, Any]] = json.loads(manifest.read_text())
    with tempfile.TemporaryDirectory() as folder:
        archives = {(entry["package"], entry["version"]): Path() for entry in entries}
        for package, version in archives:
            command = ["npm", "pack", "--silent", f"{package}@{version}"]
            name = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.split()[-1]
            archives[package, version] = Path(folder) / name
        for entry in entries:
            with tarfile.open(archives[entry["package"], entry["version"]]) as archive:
                member = archive.extractfile(f"package/{entry['member']}")
                assert member is not None, entry
                data = member.read()
            (manifest.parent / entry["file"]).write_bytes(data)
            entry["sha256"] = hashlib.sha256(data).hexdigest()
            print(f"{entry['file']}: {entry['package']} {entry['version']}, {len(data)} bytes")
    manifest.write_text(json.dumps(entries, indent=2) + "\n")


if __name__ == "__main__":
    for name in sys.argv[1:] or MANIFESTS:
        renew(Path(name))

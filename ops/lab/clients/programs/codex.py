"""Codex, which speaks the Responses API."""

from __future__ import annotations

from ..deployment import MODEL
from ..program import TASK, Program, Trial, does_task

_SETTINGS = """\
model = "{model}"
model_provider = "penstock"
approval_policy = "never"
sandbox_mode = "danger-full-access"

[model_providers.penstock]
name = "penstock"
base_url = "{base_url}"
wire_api = "responses"
env_key = "PENSTOCK_KEY"
request_max_retries = 0
stream_max_retries = 0
"""


def _run_codex(trial: Trial) -> None:
    folder = trial.home / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(_SETTINGS.format(model=MODEL, base_url=trial.base_url))
    codex = trial.installed.node_modules / ".bin" / "codex"
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    trial.run_command([codex, "exec", *options, TASK], {"PENSTOCK_KEY": "any"})


CODEX = Program("codex", ["@openai/codex"], "npm", does_task(_run_codex))

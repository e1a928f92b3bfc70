"""qwen-code, which speaks chat completions."""

from __future__ import annotations

from ..deployment import MODEL
from ..program import TASK, Program, Trial, does_task


def _run_qwen(trial: Trial) -> None:
    qwen = trial.installed.node_modules / ".bin" / "qwen"
    environment = {"OPENAI_API_KEY": "any", "OPENAI_BASE_URL": trial.base_url, "OPENAI_MODEL": MODEL}
    trial.run_command([qwen, "-p", TASK, "--yolo", "--auth-type", "openai", "--model", MODEL], environment)


QWEN_CODE = Program("qwen-code", ["@qwen-code/qwen-code"], "npm", does_task(_run_qwen))

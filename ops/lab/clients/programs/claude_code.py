"""Claude Code, which speaks the Messages API."""

from __future__ import annotations

from ..deployment import MODEL
from ..program import TASK, Program, Trial, does_task


def _run_claude(trial: Trial) -> None:
    claude = trial.installed.node_modules / ".bin" / "claude"
    environment = {
        "ANTHROPIC_BASE_URL": trial.root_url,
        "ANTHROPIC_API_KEY": "any",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_RETRIES": "0",
    }
    trial.run_command([claude, "-p", TASK, "--model", MODEL, "--allowedTools", "Write", "Bash"], environment)


CLAUDE_CODE = Program("claude-code", ["@anthropic-ai/claude-code"], "npm", does_task(_run_claude))

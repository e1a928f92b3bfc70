# pyright: reportMissingImports=false
# (vLLM is installed in an environment of its own.)
"""Program for vLLM's interpreter: the answers of vLLM's own front end, as JSON. Knows nothing of Penstock."""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Read ``{"model": ..., "requests": [[prompt_token_ids, params], ...]}``; write the tokens, or the requested
    outputs.
    """
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="ERROR",
    )
    work = json.loads(sys.stdin.read())
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    llm = LLM(work["model"], dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=8)
    answers = []
    for token_ids, values in work["requests"]:
        # JSON's keys are strings.
        values["logit_bias"] = {int(token_id): bias for token_id, bias in values.get("logit_bias", {}).items()} or None
        if "structured_outputs" in values:
            values["structured_outputs"] = StructuredOutputsParams(**values["structured_outputs"])
        (answer,) = llm.generate([{"prompt_token_ids": token_ids}], SamplingParams(**values), use_tqdm=False)
        (output,) = answer.outputs
        logprobs = [
            {str(token_id): (value.logprob, value.rank) for token_id, value in position.items()}
            for position in output.logprobs or []
        ]
        answers.append(
            {
                "token_ids": list(output.token_ids),
                "text": output.text,
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_reason,
                "logprobs": logprobs,
            }
        )
    with open(work["output"], "w") as file:
        json.dump(answers, file)


if __name__ == "__main__":
    main()

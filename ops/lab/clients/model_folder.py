"""Write the folder of the scripted model: a tokenizer of bytes and pairs, and a chat template. It has no weights."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
TOOLS_START, TOOLS_END = "<tools>", "</tools>"
RESULT_START, RESULT_END = "<tool_response>", "</tool_response>"

# In the form of Hermes and Qwen. Messages of the system may stand anywhere.
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
# Tools
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
Call a tool as <tool_call>
{"name": ..., "arguments": ...}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == "tool" %}<tool_response>
{% endif %}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content or [] %}{{ part.text or "" }}{% endfor %}
{%- endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{%- if message.role == "tool" %}
</tool_response>
{%- endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_model_folder(folder: Path) -> Tokenizer:
    """Write the folder and return its tokenizer, which is trained on the texts of this package's documentation."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    root = Path(__file__).parents[3]
    tokenizer.train([str(path) for path in (root / "README.md", root / "ARCHITECTURE.md") if path.exists()], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": TURN_END,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": 1_000_000,
        "eos_token_id": tokenizer.token_to_id(TURN_END),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return tokenizer

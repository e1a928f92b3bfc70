"""The model that the row speculation measures with: it says what a small one says, at the cost of a large one."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.ops.lab.bench.speculation.learn import SHARE, batch_of, become_part, train_tokenizer
from penstock.ops.lab.bench.speculation.row import MANY, NUM_AT_ONCE, PHASES, make_phases
from penstock.ops.lab.bench.speculation.texts import all_exercises
from penstock.ops.lab.bench.workload import WARM_UP
from penstock.worker.models.lean.reading.decoder import read_decoder

LARGE = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "initializer_range": 0.2}


def test_the_enlarged_model_has_the_logits_of_the_small_one() -> None:
    torch.manual_seed(3)
    small = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=32,
            rms_norm_eps=4e-6, **LARGE,
        )
    ).eval()  # fmt: skip
    large = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=90,
            hidden_size=32 * SHARE,
            intermediate_size=200,
            num_hidden_layers=5,
            rms_norm_eps=1e-6,
            **LARGE,
        )
    ).eval()
    become_part(large, small)
    token_ids = torch.randint(40, (2, 12))
    with torch.inference_mode():
        logits = large(token_ids).logits
        torch.testing.assert_close(logits[..., :40], small(token_ids).logits, rtol=1e-4, atol=1e-4)
    # Ids that the small one does not have are there, and are next to nothing, so that they are never said.
    assert logits[..., 40:].any()
    assert logits[..., 40:].abs().max() <= logits[..., :40].abs().max() / 60
    # With most rows of the embedding zero it was served the slow way, of whose steps drafts save less.
    read_decoder(large, 64)
    # Its other layers are computed with numbers, not with zeros.
    layers: Any = large.model.layers
    assert all(layer.self_attn.q_proj.weight.count_nonzero() > 1000 for layer in layers)


def test_every_answer_is_a_training_label_and_a_benchmark_item() -> None:
    exercises = all_exercises()
    tokenizer = train_tokenizer(exercises)
    token_ids, labels = batch_of(tokenizer, exercises)
    for row, one in enumerate(exercises):
        learnt = labels[row] != -100
        assert tokenizer.decode(token_ids[row][learnt].tolist()) == one.answer
        end = int(learnt.nonzero()[0])
        assert tokenizer.decode(token_ids[row, :end].tolist()) == one.prompt
    phases, answers = make_phases(tokenizer)
    assert [phase.name for phase in phases] == [WARM_UP, *PHASES]
    for phase in phases[1:]:
        assert [item.max_tokens for item in phase.items] == [len(answer) for answer in answers[phase.name]]
    assert len(answers[MANY]) == NUM_AT_ONCE

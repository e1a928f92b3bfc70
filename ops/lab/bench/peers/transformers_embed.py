"""Embed token ids by transformers alone in padded batches: in order of arrival, or sorted by length.

    python transformers_embed.py MODEL WORKLOAD OUTPUT THREADS

The workload is a list of lists of token ids. The output has the seconds of each order, and one mean embedding to
compare. sentence-transformers sorts a list, in batches of 32; requests that arrive online cannot be sorted.
"""

import json
import sys
import time

import torch
from transformers import AutoModel

ARRIVAL_BATCH, SORTED_BATCH = 64, 32


@torch.inference_mode()
def embed(model, texts, batch_size):  # a script of a rival's environment
    vectors = []
    for start in range(0, len(texts), batch_size):
        batch = texts[start : start + batch_size]
        shape = len(batch), max(map(len, batch))
        input_ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        for row, ids in enumerate(batch):
            input_ids[row, : len(ids)], mask[row, : len(ids)] = torch.tensor(ids), 1
        states = model(input_ids=input_ids, attention_mask=mask).last_hidden_state
        vectors += torch.nn.functional.normalize(states[:, 0].float(), dim=-1).tolist()
    return vectors


def main() -> None:
    folder, workload, output, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with open(workload) as file:  # as above
        texts = json.load(file)
    embed(model, texts[:ARRIVAL_BATCH], ARRIVAL_BATCH)
    started = time.perf_counter()
    vectors = embed(model, texts, ARRIVAL_BATCH)
    arrival_s = time.perf_counter() - started
    started = time.perf_counter()
    embed(model, sorted(texts, key=len), SORTED_BATCH)
    result = {"arrival_s": arrival_s, "sorted_s": time.perf_counter() - started, "vectors": vectors[:ARRIVAL_BATCH]}
    with open(output, "w") as file:  # as above
        json.dump(result, file)


main()

"""Write what a hub would hand out: a tiny Llama with a tokenizer, and a data set of questions and answers.

`python tiny.py DIR`: DIR/model for `from_pretrained`, DIR/data/train.json with prompts and completions.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

QUESTIONS = 4096


def main() -> None:
    """Write both."""
    out = Path(sys.argv[1])
    rows = [
        {"prompt": f"What is {n % 97} plus {n % 89}?", "completion": f" It is {n % 97 + n % 89}."}
        for n in range(QUESTIONS)
    ]
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    tokens.train_from_iterator((row["prompt"] + row["completion"] for row in rows), trainer)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokens, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    set_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=256,
            bos_token_id=0, eos_token_id=1, pad_token_id=2,
        )
    )  # fmt: skip
    tokenizer.save_pretrained(out / "model")
    model.save_pretrained(out / "model")
    (out / "data").mkdir()
    (out / "data" / "train.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main()

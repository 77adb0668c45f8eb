"""Fine-tune a small GPT on conversations, of which only the assistant's tokens count.

    python examples/finetune_chat.py --out run                          # makes conversations and a tokenizer of its own
    python examples/finetune_chat.py --out run --data chats.jsonl --tokenizer folder --steps 500

Each line of the data is one conversation, `{"messages": [{"role": "user", "content": "..."}, ...]}`. The tokenizer is a
folder of Hugging Face whose chat template marks what the assistant says by `{% generation %}`. The folder `--out` gets
`chats.h5`: the conversations as documents, each token with a field `loss_mask`. `zb show run/chats.h5 --document 0
--tokenizer hf:run/tokenizer/tokenizer.json` shows one. Needs `pip install 'zb_hdf5[torch,text]' transformers jinja2`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from train_gpt import GPT, document_mask
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from zb_hdf5 import DocumentLoader, HDF5ShardWriter, load_tokenizer, train_tokenizer

Messages = list[dict[str, str]]
#: ChatML. The model learns to write the text between `generation` and `endgeneration`.
CHAT_TEMPLATE = """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{% if message['role'] == 'assistant' %}
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
{% else %}
{{ message['content'] + '<|im_end|>' }}
{% endif %}
{{ '\\n' }}
{% endfor %}
"""


def make_conversations(path: Path, count: int = 300) -> None:
    """Write conversations about sums."""
    with open(path, "w", encoding="utf-8") as file:
        for number in range(count):
            messages = [{"role": "system", "content": "You add numbers."}]
            for turn in range(1 + number % 3):
                a = number * 7 % 50
                b = (number + turn * 11) % 50
                messages += [{"role": "user", "content": f"What is {a} plus {b}?"}]
                messages += [{"role": "assistant", "content": f"{a} plus {b} is {a + b}."}]
            file.write(json.dumps({"messages": messages}) + "\n")


def read_conversations(path: Path) -> list[Messages]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line)["messages"] for line in file if line.strip()]


def make_tokenizer(conversations: list[Messages], folder: Path) -> None:
    """Train a tokenizer on the conversations, and give it the special tokens and the template of ChatML."""
    texts = folder.with_suffix(".texts.jsonl")
    trained = folder.with_suffix(".json")
    with open(texts, "w", encoding="utf-8") as file:
        for messages in conversations:
            file.write(json.dumps({"text": "\n".join(message["content"] for message in messages)}) + "\n")
    train_tokenizer(texts, trained, 320, overwrite=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(trained), chat_template=CHAT_TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.save_pretrained(folder)


def encode(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> tuple[list[int], list[int]]:
    """Return the tokens of a conversation, and for each one 1 if the assistant says it, else 0."""
    found = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    return found["input_ids"], found["assistant_masks"]


def write_documents(conversations: list[Messages], folder: Path, path: Path) -> int:
    """Write each conversation as a document; return the size of the vocabulary."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(f"hf:{folder / 'tokenizer.json'}")
    with HDF5ShardWriter(
        path,
        dtype="uint16" if ours.vocab_size <= 2**16 else "uint32",
        vocab_size=ours.vocab_size,
        tokenizer=json.dumps(ours.description),
        fields={"loss_mask": "u1"},
        overwrite=True,
    ) as writer:
        for number, messages in enumerate(conversations):
            tokens, mask = encode(tokenizer, messages)
            if any(message["role"] == "assistant" for message in messages) and not any(mask):
                raise SystemExit(f"{folder}: its chat template has no {{% generation %}}: nothing would be learned")
            writer.write_document(tokens, {"loss_mask": mask}, id=number)
    return ours.vocab_size


def inputs_of(batch: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Return tokens, targets, mask and positions of a packed batch, as one row."""
    x, y, positions = (batch[name].unsqueeze(0) for name in ("tokens", "targets", "position_ids"))
    return x, y, document_mask(batch["cu_seqlens"], *x.shape), positions


def next_batch(loader: DocumentLoader) -> dict[str, Any]:
    """Return the next batch in which a target counts: the mean loss of none would be no number."""
    for _ in range(len(loader) + 1):
        batch = loader.get_batch()
        if (batch["targets"] != -100).any():
            return batch
    raise SystemExit("the assistant says nothing in the first --max-tokens tokens of any conversation")


def train(model: GPT, loader: DocumentLoader, steps: int, lr: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(1, steps + 1):
        batch = next_batch(loader)
        optimizer.zero_grad()
        loss = model(*inputs_of(batch))
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step in (1, steps):
            counted = int((batch["targets"] != -100).sum())
            total = len(batch["targets"])
            print(f"step {step:>4}  loss {loss.item():.3f}  {counted} of {total} targets count", flush=True)


def gradients(model: GPT, batch: dict[str, Any]) -> tuple[float, float]:
    """Return the largest gradient of the logits where the target does not count, and the smallest where it does."""
    x, y, mask, positions = inputs_of(batch)
    logits = model.logits(x, mask, positions)
    logits.retain_grad()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
    assert logits.grad is not None
    sizes = logits.grad.abs().amax(-1)
    return sizes[y == -100].max().item(), sizes[y != -100].min().item()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="folder for all that is made")
    parser.add_argument("--data", type=Path, help="JSON lines of conversations")
    parser.add_argument("--tokenizer", type=Path, help="folder of a Hugging Face tokenizer with a chat template")
    numbers = {"steps": 60, "max-tokens": 512, "width": 64, "layers": 2, "seed": 1}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"[default: {default}]")
    parser.add_argument("--lr", type=float, default=3e-3, help="[default: 0.003]")
    return parser.parse_args()


def main() -> None:
    options = parse()
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    if options.data is None:
        make_conversations(out / "chats.jsonl")
    conversations = read_conversations(options.data or out / "chats.jsonl")
    if options.tokenizer is None:
        make_tokenizer(conversations, out / "tokenizer")
    vocab_size = write_documents(conversations, options.tokenizer or out / "tokenizer", out / "chats.h5")
    torch.manual_seed(options.seed)
    model = GPT(vocab_size, options.max_tokens, options.width, options.layers)
    with DocumentLoader(
        out / "chats.h5",
        collate="pack",
        max_tokens=(options.max_tokens, "truncate"),
        targets=True,  # and none where the field `loss_mask` is 0
        seed=options.seed,
    ) as loader:
        found = loader.documents
        print(f"{found.count:,} conversations, {found.truncated_documents:,} cut, {len(loader):,} steps an epoch")
        train(model, loader, options.steps, options.lr)
        masked, counted = gradients(model, next_batch(loader))
    print(f"gradient of the logits: at most {masked} where no target counts, at least {counted:.1e} where one does")


if __name__ == "__main__":
    main()

"""Train a tiny model with a trainer that is not DeepSpeed; what it saves is what that trainer writes.

`python -m torch.distributed.run --nproc_per_node N -m tests.support.other_trainers LAYOUT SAVE_DIR STEPS
[RESUME_FROM]` saves at every second step and prints `step N loss L` for each.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from examples.demo.ending import leave

SEED = 7
MARKER, MANIFEST = "DONE", "SHA256SUMS"
"""Files that a script writes last, so that a job file can name them."""


def model() -> torch.nn.Module:
    """A model with more than one tensor of each kind."""
    torch.manual_seed(SEED)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))


def batch(step: int) -> torch.Tensor:
    """The same data at the same step, whoever trains."""
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(step))


def told(step: int, loss: torch.Tensor) -> None:
    """One line of rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.6f}", flush=True)


class Wrapped(torch.nn.Module):  # type: ignore[misc]
    """As the Trainer wants a model: it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The mean square of the output."""
        return {"loss": self.inner(x).square().mean()}


class Batches(torch.utils.data.Dataset):  # type: ignore[misc]
    """One row a step and rank, in order."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": batch(index)[0]}


def huggingface(
    save_dir: str, steps: int, resume_from: str | None, kind: str | None = None, **more: Any
) -> None:
    """transformers.Trainer, DDP; `kind`: of state, with FSDP2."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Told(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.is_world_process_zero and "loss" in more["logs"]:
                told(state.global_step, torch.tensor(float(more["logs"]["loss"])))

    if kind is not None:
        fsdp_on_cpu()
        how = {"version": 2, "state_dict_type": kind, "cpu_ram_efficient_loading": False}
        more |= {"fsdp": "full_shard", "fsdp_config": how}
    arguments = TrainingArguments(
        save_dir,
        use_cpu=True,
        max_steps=steps,
        logging_steps=1,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        disable_tqdm=True,
        report_to=[],
        seed=SEED,
        **{"save_steps": 2} | more,
    )
    trainer = Trainer(model=Wrapped(), args=arguments, train_dataset=Batches(), callbacks=[Told()])
    trainer.train(resume_from_checkpoint=resume_from)


def fsdp_on_cpu() -> None:
    """Let Accelerate's FSDP run without a GPU: it takes up the plugin only where it has seen one.

    All else is its own: wrapping by `fully_shard`, saving and loading run on gloo.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    begin = AcceleratorState.__init__

    def init(self: Any, *arguments: Any, fsdp_plugin: Any = None, **more: Any) -> None:
        begin(self, *arguments, fsdp_plugin=fsdp_plugin, **more)
        if fsdp_plugin is not None:
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            state = {"distributed_type": DistributedType.FSDP, "fsdp_plugin": fsdp_plugin}
            AcceleratorState._shared_state.update(state)

    AcceleratorState.__init__ = init


def accelerate(save_dir: str, steps: int, resume_from: str | None, kind: str | None = None) -> None:
    """Accelerator.save_state into folders of our own naming; `kind`: of state, with FSDP2."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = None
    if kind is not None:
        fsdp_on_cpu()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, state_dict_type=kind, cpu_ram_efficient_loading=False
        )
    at = Accelerator(cpu=True, fsdp_plugin=plugin)
    net = model()
    net, optimizer = at.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    first = 0
    if resume_from is not None:
        at.load_state(resume_from)
        first = int(resume_from.rpartition("step_")[2])
    for step in range(first + 1, steps + 1):
        loss = net(batch(step)).square().mean()
        at.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        told(step, loss)
        if step % 2 == 0:
            at.save_state(f"{save_dir}/step_{step}")


def lightning(save_dir: str, steps: int, resume_from: str | None, strategy: Any = None, **more: Any) -> None:
    """pytorch_lightning.Trainer, DDP: files of save_dir, and last.ckpt."""
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import ModelCheckpoint

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()

        def training_step(self, _rows: Any, _index: int) -> torch.Tensor:
            loss: torch.Tensor = self.inner(batch(self.global_step + 1)).square().mean()
            told(self.global_step + 1, loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def configure_model(self) -> None:
            if strategy is not None:
                from torch.distributed.fsdp import fully_shard

                assert self.device_mesh is not None
                fully_shard(self.inner, mesh=self.device_mesh["data_parallel"])

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy or ("ddp" if ranks > 1 else "auto"),
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            ModelCheckpoint(
                dirpath=save_dir,
                filename="{epoch}-{step}",
                **{"every_n_train_steps": 2, "save_top_k": -1, "save_last": True} | more,
            )
        ],
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Batches(), batch_size=2), ckpt_path=resume_from)


def one_file(save_dir: str, step: int, state: dict[str, Any]) -> None:
    """Save with torch.save, whose end proves itself."""
    torch.save(state, f"{save_dir}/model_{step}.pt")


def one_blob(save_dir: str, step: int, state: dict[str, Any]) -> None:
    """Save in a format that nobody else knows."""
    data = io.BytesIO()
    torch.save(state, data)
    Path(save_dir, f"state_{step}.blob").write_bytes(b"BLOB" + data.getvalue())


def read_blob(path: str) -> Any:
    """Read it back."""
    return torch.load(io.BytesIO(Path(path).read_bytes()[4:]))


def one_folder(save_dir: str, step: int, state: dict[str, Any], last: str) -> None:
    """Save files of one's own in a folder; `last`, a marker or a list of their sums, is written last."""
    folder = Path(save_dir, f"ckpt_{step}")
    folder.mkdir()
    torch.save(state["model"], folder / "weights.pt")
    torch.save(state["optimizer"], folder / "adam.pt")
    (folder / "progress.json").write_text(json.dumps({"step": step}))
    sums = (f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in sorted(folder.iterdir()))
    (folder / last).write_text("" if last == MARKER else "".join(sums))


def read_folder(path: str) -> Any:
    """Read it back."""
    model, optimizer = (torch.load(f"{path}/{name}.pt") for name in ("weights", "adam"))
    return {"model": model, "optimizer": optimizer, **json.loads(Path(path, "progress.json").read_text())}


def script(
    save_dir: str,
    steps: int,
    resume_from: str | None,
    save: Callable[[str, int, dict[str, Any]], None] = one_file,
    load: Callable[[str], Any] = torch.load,
) -> None:
    """A loop of one's own."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    first = 0
    if resume_from is not None:
        state = load(resume_from)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    for step in range(first + 1, steps + 1):
        loss = net(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told(step, loss)
        if step % 2 == 0 and int(os.environ.get("RANK", "0")) == 0:
            save(
                save_dir, step, {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            )


def lightning_fsdp(save_dir: str, steps: int, resume_from: str | None) -> None:
    """pytorch_lightning with FSDP2: a folder for each checkpoint."""
    from pytorch_lightning.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(
        data_parallel_size=int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1, process_group_backend="gloo"
    )
    lightning(save_dir, steps, resume_from, strategy=strategy)


def torch_shards(save_dir: str, steps: int, resume_from: str | None) -> None:
    """FSDP2 and torch.distributed.checkpoint, as torchtitan."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    net = model()
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    first = 0
    if resume_from is not None:
        weights, states = get_state_dict(net, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": states, "step": 0}
        checkpoint.load(state, checkpoint_id=resume_from)
        set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=states)
        first = int(state["step"])
    for step in range(first + 1, steps + 1):
        loss = net(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told(step, loss)
        if step % 2 == 0:
            weights, states = get_state_dict(net, optimizer)
            state = {"model": weights, "optimizer": states, "step": step}
            checkpoint.save(state, checkpoint_id=f"{save_dir}/step-{step}")


def titan_on_cpu() -> None:
    """Let torchtitan train without a GPU: it asks torch.cpu what torch.cuda answers, and gloo only sums."""
    from torch.distributed.fsdp import FSDPModule

    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.current_device = lambda: 0
    torch.cpu.get_device_name = lambda _device=None: "CPU"
    torch.cpu.get_device_properties = lambda _device=None: SimpleNamespace(total_memory=2**30)
    torch.cpu.memory_stats = lambda _device=None: {}
    torch.cpu.empty_cache = torch.cpu.reset_peak_memory_stats = lambda: None
    divide = FSDPModule.set_gradient_divide_factor

    def divide_after_the_sum(self: Any, factor: float) -> None:
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = divide_after_the_sum


def torchtitan(save_dir: str, steps: int, resume_from: str | None) -> None:
    """torchtitan's own trainer and checkpointer, on the debug model of its Llama 3."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    titan_on_cpu()
    from torchtitan.config import ConfigManager
    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer

    # it goes on from the newest step-N of its folder by itself
    assert resume_from is None or Path(resume_from).parent == Path(save_dir)
    is_of_ckptd = resume_from is not None and Path(resume_from, "ckptd.json").exists()
    without = ("--checkpoint.exclude_from_loading", "lr_scheduler,dataloader,train_state")
    words = [f"w{number}" for number in range(100)]
    tokenizer = Tokenizer(
        models.WordLevel({"<s>": 0, "</s>": 1} | {w: n for n, w in enumerate(words, 2)}, unk_token="<s>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    init_logger()
    with tempfile.TemporaryDirectory(prefix="ckptd-titan-") as place:
        data = Path(place, "data")
        data.mkdir()
        texts = (" ".join(words[(row * column) % 100] for column in range(200)) for row in range(100))
        Path(data, "rows.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        tokenizer.save(f"{place}/tokenizer.json")
        Path(place, "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
        config = ConfigManager().parse_args(
            [
                *("--model.name", "llama3", "--model.flavor", "debugmodel", "--model.hf_assets_path", place),
                *("--training.dataset", "c4_test", "--training.dataset_path", str(data)),
                *("--training.steps", str(steps), "--training.seq_len", "64"),
                *("--training.local_batch_size", "2", "--lr_scheduler.warmup_steps", "0"),
                *(
                    "--checkpoint.enable",
                    "--checkpoint.interval",
                    "2",
                    "--checkpoint.no_last_save_model_only",
                ),
                *("--checkpoint.folder", str(Path(save_dir).resolve()), "--job.dump_folder", place),
                *("--metrics.log_freq", "1", "--metrics.disable_color_printing"),
                *(without if is_of_ckptd else ()),
            ]
        )
        trainer = Trainer(config)
        trainer.train()
        trainer.close()


TRAINERS: dict[str, Callable[..., None]] = {
    "huggingface": huggingface,
    "accelerate": accelerate,
    "torch": torch_shards,
    "lightning": lightning,
    "torch-file": script,
    "declared-marker": partial(script, save=partial(one_folder, last=MARKER), load=read_folder),
    "declared-manifest": partial(script, save=partial(one_folder, last=MANIFEST), load=read_folder),
    "declared-quiet": partial(script, save=one_blob, load=read_blob),
    "torchtitan": torchtitan,
    "accelerate-fsdp-full": partial(accelerate, kind="FULL_STATE_DICT"),
    "accelerate-fsdp-sharded": partial(accelerate, kind="SHARDED_STATE_DICT"),
    "huggingface-fsdp-full": partial(huggingface, kind="FULL_STATE_DICT"),
    "huggingface-fsdp-sharded": partial(huggingface, kind="SHARDED_STATE_DICT"),
    "lightning-fsdp": lightning_fsdp,
}
TAG_OF = {
    "huggingface": "checkpoint-{}",
    "accelerate": "step_{}",
    "torch": "step-{}",
    "lightning": "epoch=0-step={}.ckpt",
    "torch-file": "model_{}.pt",
    "declared-marker": "ckpt_{}",
    "declared-manifest": "ckpt_{}",
    "declared-quiet": "state_{}.blob",
    "torchtitan": "step-{}",
    "accelerate-fsdp-full": "step_{}",
    "accelerate-fsdp-sharded": "step_{}",
    "huggingface-fsdp-full": "checkpoint-{}",
    "huggingface-fsdp-sharded": "checkpoint-{}",
    "lightning-fsdp": "epoch=0-step={}.ckpt",
}
"""What bears the name of a step."""


def main() -> None:
    """Train as the command line says."""
    layout, save_dir, steps, *rest = sys.argv[1:]
    torch.set_num_threads(1)
    Path(save_dir).mkdir(parents=True, exist_ok=True)
    TRAINERS[layout](save_dir, int(steps), rest[0] if rest else None)
    leave()


if __name__ == "__main__":
    main()

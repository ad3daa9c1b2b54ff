"""`python -m ckptd.maintenance.deepspeed_load_child`: loads one checkpoint folder by DeepSpeed's own code.

Request on stdin: {"folder": path, "ranks": processes}. As many processes as the save had data-parallel
ranks build a model of empty parameters with the names and shapes that the save lists, call
`deepspeed.initialize` and `load_checkpoint`, and compare what the engine holds then with the files. The
result is one JSON line on stdout, and so is each rank's failure. Pickles are read by torch's restricted
reader (`weights_only`), also where DeepSpeed asks for another one: no code of a checkpoint runs (P14). There
is no network but a loopback of this process's own (docs/adr/0217).
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import pickle
import signal
import socket
import struct
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ckptd.base.humanize import size_of
from ckptd.conversion.engine.sandbox import UNLIMITED, restrict
from ckptd.errors import CkptdError, DamagedError, NoSpaceError, RefusedError, from_os_error
from ckptd.maintenance.deepspeed_load import Loaded

if TYPE_CHECKING:
    from collections.abc import Mapping

HOST = "127.0.0.1"
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_PR_SET_PDEATHSIG = 1
_MASTER = "fp32"
"""File and state name of master weights."""
_PROCESS_BYTES = 400 << 20
"""Memory of a process with torch and DeepSpeed, before it holds anything."""
_SPARE = 1.2
"""Room for what a load allocates beside weights, masters and states."""


def main() -> int:
    """Serve one request; exit status 0: it is loaded and equal."""
    request = json.loads(sys.stdin.buffer.read())
    told = os.dup(1)
    os.dup2(2, 1)  # what torch and DeepSpeed print is no answer
    held = restrict(memory_bytes=UNLIMITED, cpu_seconds=UNLIMITED, file_bytes=UNLIMITED)
    if "no-network" in held:
        _start_loopback()
    try:
        return _load_on(int(request["ranks"]), Path(request["folder"]), told)
    except OSError as error:
        return _say(told, from_os_error(error, f"loading {request['folder']}").as_data)


def _start_loopback() -> None:
    """Bring up `lo` of a new network namespace: processes of one load meet there, and nobody else does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("16sh22x", b"lo", 0)
        flags = struct.unpack("16sh22x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, asked))[1]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | _IFF_UP))


def _load_on(ranks: int, folder: Path, told: int) -> int:
    """Fork one process a rank and wait for all; the first that fails ends the others."""
    with socket.create_server((HOST, 0)) as found:
        port = found.getsockname()[1]
    parent = os.getpid()
    running = {_fork(rank, ranks, port, folder, told, parent) for rank in range(ranks)}
    status = 0
    while running:
        pid, ended = os.wait()
        running.discard(pid)
        if ended and not status:
            status = os.waitstatus_to_exitcode(ended)
            for other in running:
                os.kill(other, signal.SIGKILL)
    return status if status >= 0 else 128 - status


def _fork(rank: int, ranks: int, port: int, folder: Path, told: int, parent: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    status = 1
    try:
        if os.getppid() == parent:
            status = _serve(rank, ranks, port, folder, told)
    finally:
        os._exit(status)


def _serve(rank: int, ranks: int, port: int, folder: Path, told: int) -> int:
    """Load as one rank; the lowest says what came of it."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_SIZE=str(ranks),
        MASTER_ADDR=HOST,
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        DS_ACCELERATOR="cpu",
        OMP_NUM_THREADS="1",
        TORCH_FORCE_WEIGHTS_ONLY_LOAD="1",
    )
    try:
        loaded = _Load(folder, ranks).run()
    except CkptdError as error:
        return _say(told, error.as_data)
    except pickle.UnpicklingError as error:
        name = str(error).partition("GLOBAL ")[2].split(" ", 1)[0] or "what torch does not allow"
        text = f"{folder.name} is not loaded: a pickle in it names {name}"
        return _say(
            told, RefusedError(text, hint="nothing of a checkpoint is run; its trainer loads it").as_data
        )
    except Exception as error:  # noqa: BLE001 - whatever DeepSpeed says of a checkpoint is the answer
        said = str(error).strip().splitlines() or [""]
        text = f"DeepSpeed does not load {folder.name}: {type(error).__name__}: {said[0][:300]}"
        return _say(told, DamagedError(text, hint="`ckptd inspect` shows what the folder holds").as_data)
    if rank == 0:
        _say(told, asdict(loaded))
    return 0


def _say(told: int, words: Mapping[str, Any]) -> int:
    """Write one JSON line by one call, so that those of several ranks do not mix; return 1, for a failure."""
    os.write(told, json.dumps(words).encode() + b"\n")
    return 1


class _Load:
    """One load by one rank: the model that the save lists, DeepSpeed's engine, the comparison."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._folder = folder
        self._ranks = ranks
        self._is_universal = (folder / "zero").is_dir()
        self._parameters: dict[str, Any] = {}

    def run(self) -> Loaded:
        """Load and compare.

        Raises:
            RefusedError: another kind of save.
            DamagedError: other values than the files hold.
            NoSpaceError: too little memory is free.
        """
        import deepspeed
        import torch

        _allow_names_of_deepspeed()
        torch.set_num_threads(1)
        self._states = self._read(self._model_states())
        self._refuse_what_needs_the_models_code()
        groups = [dict(group) for group in self._states["param_shapes"]]
        trained = {name: shape for group in groups for name, shape in group.items()}
        names = self._state_names(trained)
        self._refuse_without_memory(trained, names)
        model = self._model(trained)
        kept = [{"params": [self._parameters[name] for name in group]} for group in groups]
        engine = _engine(model, kept, names, self._config(trained))
        path, _ = engine.load_checkpoint(
            str(self._folder.parent), tag=self._folder.name, load_lr_scheduler_states=False
        )
        if path is None:
            raise DamagedError(f"DeepSpeed finds nothing to load in {self._folder.name}")
        compared = self._compare(trained, names)
        return Loaded(
            name=self._folder.name,
            deepspeed=deepspeed.__version__,
            torch=torch.__version__,
            stage=self._stage,
            ranks=self._ranks,
            step=engine.global_steps,
            tensors=len(trained),
            elements=sum(_count(shape) for shape in trained.values()),
            states=names,
            compared=compared,
        )

    @property
    def _stage(self) -> int:
        """ZeRO stage to load with: a universal form has none of its own, 1 serves it."""
        zero = self._states["ds_config"].get("zero_optimization") or {}
        return 1 if self._is_universal else int(zero.get("stage", 0))

    def _model_states(self) -> Path:
        found = sorted(self._folder.glob("*model_states.pt"))
        shards = [path for path in found if path.name.startswith(("mp_rank_", "zero_pp_rank_"))]
        if len(shards) != len(found) or not shards:
            raise RefusedError(
                f"{self._folder.name} holds a pipeline or experts", hint="their model's own code loads them"
            )
        return shards[0]

    def _read(self, path: Path) -> Any:
        """Read a file of torch without copying its tensors."""
        import torch

        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)

    def _refuse_what_needs_the_models_code(self) -> None:
        states = self._states
        if not isinstance(states.get("module"), dict) or not states.get("param_shapes"):
            raise RefusedError(
                f"{self._folder.name} does not list its parameters", hint="a pipeline, or no ZeRO save"
            )
        if int(states.get("mp_world_size") or 1) > 1:
            raise RefusedError(
                f"{self._folder.name} is of a tensor-parallel model", hint="its own code loads it"
            )

    def _state_names(self, trained: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the optimizer's states, from the files of one parameter."""
        if self._is_universal:
            first = self._folder / "zero" / next(iter(trained))
            return tuple(sorted({path.stem for path in first.glob("*.pt")} - {_MASTER}))
        shard = sorted(self._folder.glob("*optim_states.pt"))[0]
        held = self._read(shard)["optimizer_state_dict"]
        for name in ("base_optimizer_state", "optimizer_state_dict"):
            held = held.get(name, held)
        rows = held["state"].values() if "state" in held else held
        return tuple(sorted({name for row in rows for name in row}))

    def _refuse_without_memory(self, trained: dict[str, Any], names: tuple[str, ...]) -> None:
        """Refuse before torch allocates: weights on every rank, masters, gradients and states once."""
        elements = sum(_count(shape) for shape in trained.values())
        needed = (
            int(_SPARE * elements * (2 * self._ranks + 8 + 4 * len(names))) + self._ranks * _PROCESS_BYTES
        )
        free = psutil.virtual_memory().available
        if needed > free:
            raise NoSpaceError(
                f"loading {elements:,} elements on {self._ranks} ranks takes {size_of(needed)} of memory, "
                f"{size_of(free)} are free",
                hint="load it on another host: `ckptd verify URL TAG --load`",
            )

    def _model(self, trained: dict[str, Any]) -> Any:
        """Build modules by the dots in the names; every value is zero."""
        import torch

        states = self._states
        root = torch.nn.Module()
        frozen = dict(states.get("frozen_param_shapes") or {})
        dtype = self._dtype(trained)
        for name, shape in {**trained, **frozen}.items():
            parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=name in trained)
            self._parameters[name] = parameter
            _put(root, name, parameter)
        for alias, name in (states.get("shared_params") or {}).items():
            _put(root, alias, self._parameters[name])
        for name in states.get("buffer_names") or ():
            if name in states["module"]:
                _put(root, name, torch.zeros_like(states["module"][name]))
        return root

    def _dtype(self, trained: dict[str, Any]) -> Any:
        return self._states["module"][next(iter(trained))].dtype

    def _config(self, trained: dict[str, Any]) -> dict[str, Any]:
        import torch

        dtype = self._dtype(trained)
        return {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": self._stage},
            "bf16": {"enabled": dtype == torch.bfloat16},
            "fp16": {"enabled": dtype == torch.float16},
            "checkpoint": {"load_universal": self._is_universal},
        }

    def _compare(self, trained: dict[str, Any], names: tuple[str, ...]) -> tuple[str, ...]:
        """Compare the engine's masters and states with the files, bit for bit; return what was compared."""
        from deepspeed.utils import safe_get_full_fp32_param as master_of
        from deepspeed.utils import safe_get_full_optimizer_state as state_of

        compared: dict[str, None] = {}
        for name in trained:
            parameter = self._parameters[name]
            master = master_of(parameter)
            weight = self._states["module"][name]
            if weight.numel() == master.numel():
                self._must_be_equal(master.to(weight.dtype), weight, f"{name}: its masters, rounded")
                compared["masters, rounded, with the model's weights"] = None
            if not self._is_universal:
                continue
            folder = self._folder / "zero" / name
            for state in (_MASTER, *names):
                want = self._read(folder / f"{state}.pt")
                want = want.get("param") if isinstance(want, dict) else None
                if want is not None:
                    got = master if state == _MASTER else state_of(parameter, state)
                    self._must_be_equal(got, want, f"{name}: {state}")
            compared["masters and states with the form's files"] = None
        return tuple(compared)

    def _must_be_equal(self, got: Any, want: Any, what: str) -> None:
        import torch

        if not torch.equal(got.reshape(-1), want.reshape(-1)):
            raise DamagedError(
                f"{what}, as DeepSpeed holds them after the load, are not what {self._folder.name} says"
            )


def _allow_names_of_deepspeed() -> None:
    """Allow the plain values of DeepSpeed that its saves hold, beside what torch allows by itself."""
    import torch
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    torch.serialization.add_safe_globals([ZeroStageEnum, fragment_address, LossScaler, DynamicLossScaler])


def _engine(model: Any, groups: list[dict[str, Any]], names: tuple[str, ...], config: dict[str, Any]) -> Any:
    """Return DeepSpeed's engine around an optimizer that only holds states, zero until they are loaded."""
    import deepspeed
    import torch

    class Holder(torch.optim.Optimizer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(groups, {"lr": 0.0})

        def step(self, _closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self._fill(parameter)

        def _fill(self, parameter: Any) -> None:
            state = self.state[parameter]
            for name in names:
                if name not in state and parameter.grad is not None:
                    state[name] = torch.zeros(()) if name == "step" else torch.zeros_like(parameter)

    # a compiler's minute, for collectives that nobody here waits for
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=Holder(), config=config)
    return engine


def _put(root: Any, name: str, value: Any) -> None:
    """Register a parameter or buffer under its dotted name."""
    import torch

    *path, last = name.split(".")
    at = root
    for part in path:
        if part not in at._modules:
            at.add_module(part, torch.nn.Module())
        at = at._modules[part]
    if isinstance(value, torch.nn.Parameter):
        at.register_parameter(last, value)
    else:
        at.register_buffer(last, value)


def _count(shape: Any) -> int:
    count = 1
    for size in shape:
        count *= int(size)
    return count


if __name__ == "__main__":
    sys.exit(main())

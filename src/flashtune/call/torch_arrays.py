"""torch CUDA tensors: addresses and strides are read directly, memory and stream are torch's own.

A call like the last one is known by a check that torch offers to code which it compiled; all others by their key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flashtune.errors import InvalidType, LaunchError

from .arrays import ArrayFacts, Options
from .check import check_overlap
from .gpu_arrays import GpuArrays, ReadyCall, foreign
from .layer import CudaLayer, Layer

DTYPES = ("float16", "bfloat16", "float32", "float64")


class _NoForwardMode:
    """In place of ``torch.autograd.forward_ad`` where it can't be asked."""

    _current_level = -1


class _Recent:
    """The last kind of call. ``check`` compares types, dtypes, devices, shapes, strides, requires_grad and dispatch
    keys of q, k and v with those of that call, in one step in C++.
    """

    __slots__ = ("check", "low_bits", "options", "ready")

    def __init__(
        self, check: Callable[[Any, Any, Any], bool], low_bits: int, options: Options, ready: ReadyCall
    ) -> None:
        self.check = check
        self.low_bits = low_bits
        self.options = options
        self.ready = ready


class TorchArrays(GpuArrays):
    """``torch`` is the module, so that tests can give another one."""

    name = "torch tensor"
    graphs_own_memory = True

    def __init__(self, torch: Any, layer: Layer) -> None:
        super().__init__(layer)
        self.torch = torch
        self.types = (torch.Tensor, torch.nn.Parameter)
        self._empty = _empty_on_current_device(torch)
        self._guards = _tensor_guards(torch)
        self._recent: _Recent | None = None
        self._is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
        forward_ad = getattr(torch.autograd, "forward_ad", None)
        self._forward: Any = forward_ad if hasattr(forward_ad, "_current_level") else _NoForwardMode
        self._float32 = torch.float32
        self._plain_dispatch = getattr(torch.Tensor, "__torch_dispatch__", None)
        self._dtypes = {getattr(torch, name): name for name in DTYPES}
        self._stream = _current_stream(torch)
        self._context = layer.context
        if refused := getattr(torch, "AcceleratorError", None):
            layer.errors = (*layer.errors, refused)

    def call(self, q: Any, k: Any, v: Any, out: Any, options: Options) -> Any:
        recent = self._recent
        try:
            q_address = q.data_ptr()
            k_address = k.data_ptr()
            v_address = v.data_ptr()
            if (
                recent is not None
                and out is None
                and options == recent.options
                and recent.check(q, k, v)
                and (q_address | k_address | v_address) & 15 == recent.low_bits
                and q_address
                and k_address
                and v_address
                and self._forward._current_level < 0
                and self._context() == recent.ready.context
            ):
                return self._launch(recent.ready, q, q_address, k_address, v_address, options[2])
            key: tuple[Any, ...] = (
                q.shape,
                k.shape,
                v.shape,
                q.stride(),
                k.stride(),
                v.stride(),
                q.dtype,
                k.dtype,
                v.dtype,
                q.get_device(),
                k.get_device(),
                v.get_device(),
                q.is_cuda and k.is_cuda and v.is_cuda,
                (q_address | k_address | v_address) & 15,
                q_address == 0 or k_address == 0 or v_address == 0,  # a subclass, freed memory, or nothing to read
                (q.requires_grad or k.requires_grad or v.requires_grad) and self._is_grad_enabled(),
                self._forward._current_level >= 0 and self._has_tangent((q, k, v)),
                options,
            )
            if out is not None:
                out_address = out.data_ptr()
                key += (
                    out.shape,
                    out.stride(),
                    out.dtype,
                    out.get_device(),
                    out.is_cuda,
                    out_address & 15 if out_address else None,
                    out.requires_grad and self._is_grad_enabled(),
                )
            ready = self.memo.get(key)
        except LaunchError:
            raise
        except (AttributeError, TypeError, RuntimeError, ValueError) as error:
            raise self.refuse(q, k, v, out, options, error) from None
        if ready is None:
            return self.call_first(key, q, k, v, out, options)
        if self._context() != ready.context:
            return self.launch_uncommon(ready, q, k, v, out)
        if out is None:
            self._recent = self._guarded(ready, q, k, v, (q_address | k_address | v_address) & 15, options, recent)
            return self._launch(ready, q, q_address, k_address, v_address, options[2])
        check_overlap(ready.extents, q_address, k_address, v_address, out_address)
        return self._launch(ready, q, q_address, k_address, v_address, options[2], out)

    def _launch(
        self, ready: ReadyCall, q: Any, q_at: int, k_at: int, v_at: int, return_lse: bool, out: Any = None
    ) -> Any:
        """Of a call that needs no copy, in the context of ``ready``."""
        try:
            if out is None:
                out = self._empty(ready.shape, ready.out_strides, q.dtype)
            stream = self._stream(ready.device)
            if return_lse:
                lse = self._empty(ready.lse_shape, ready.lse_strides, self._float32)
                ready.launch(q_at, k_at, v_at, out.data_ptr(), lse.data_ptr(), stream)
                return out, lse
            ready.launch(q_at, k_at, v_at, out.data_ptr(), 0, stream)
        except self.layer.errors as error:  # the allocator's: a launch raises its own
            raise LaunchError.of(f"memory for the result of attention() on cuda:{ready.device}", error) from error
        return out

    def _guarded(
        self, ready: ReadyCall, q: Any, k: Any, v: Any, low_bits: int, options: Options, recent: _Recent | None
    ) -> _Recent | None:
        """What recognises the next call like this one, if torch can: without its key, and so without most of the time.

        A guard of ``ready`` that was made before is kept, unless it was just asked and said no: it also holds torch's
        inference mode. None where a tensor requires grad, which a guard does not weigh against the grad mode.
        """
        if self._guards is None or q.requires_grad or k.requires_grad or v.requires_grad:
            return None
        if q is k or q is v or k is v:  # guards say no to one tensor in two places
            return None
        kept: _Recent | None = ready.recent
        if kept is None or kept is recent or kept.low_bits != low_bits or kept.options != options:
            kept = ready.recent = _Recent(self._guards(q, k, v), low_bits, options, ready)
        return kept

    def forget(self) -> None:
        super().forget()
        self._recent = None

    def refusal(self, kind: type) -> str | None:
        if reason := super().refusal(kind):
            return reason
        if getattr(kind, "__torch_dispatch__", None) is not self._plain_dispatch:
            return f"{kind.__module__}.{kind.__qualname__} is a tensor without memory of its own"
        return None

    def facts(self, name: str, array: Any) -> ArrayFacts:
        if not self.owns(array):
            raise foreign(name, array, self.name)
        if reason := self.refusal(type(array)):
            raise InvalidType(f"{name}: {reason}")
        if array.layout is not self.torch.strided or array.is_nested:
            raise InvalidType(f"{name} is a tensor with layout {array.layout}: only strided tensors are supported")
        try:
            address = array.data_ptr()
        except RuntimeError as error:
            raise InvalidType(f"{name} is a tensor without memory of its own: {error}") from None
        if not address and 0 not in array.shape:
            raise InvalidType(f"{name} is a tensor without memory of its own: its storage has been freed")
        return ArrayFacts(
            name=name,
            shape=tuple(array.shape),
            strides=tuple(array.stride()),
            dtype=self._dtypes.get(array.dtype, str(array.dtype).removeprefix("torch.")),
            item_bytes=array.element_size(),
            device=str(array.device),
            address=address,
        )

    def forbid(self, arrays: Sequence[Any]) -> None:
        if self._is_grad_enabled() and any(array.requires_grad for array in arrays):
            raise NotImplementedError(
                "an argument requires grad, and attention() has no backward pass yet: call it under torch.no_grad() "
                "or torch.inference_mode(), or pass detached tensors"
            )
        if self._forward._current_level >= 0 and self._has_tangent(arrays):
            raise NotImplementedError(
                "an argument is a dual tensor of forward-mode differentiation, which attention() does not follow yet: "
                "pass its primal"
            )

    def _has_tangent(self, arrays: Sequence[Any]) -> bool:
        return any(self._forward.unpack_dual(array).tangent is not None for array in arrays)

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        return like.new_empty(shape, dtype=getattr(self.torch, dtype))

    def workspace(self, size: int) -> tuple[Any, int]:
        memory = self._empty((size,), (1,), self.torch.uint8)
        return memory, memory.data_ptr()

    def contiguous(self, array: Any) -> Any:
        return array.resolve_neg().contiguous()

    def address(self, array: Any) -> int:
        address: int = array.data_ptr()
        return address

    def device(self, array: Any) -> int:
        index: int = array.get_device()
        return index

    def stream(self, device: int) -> int:
        return self._stream(device)


def _dynamo_guards(torch: Any) -> Any:
    """torch's own tools for code that it compiled; not public, so nothing relies on them being there."""
    return getattr(getattr(torch._C, "_dynamo", None), "guards", None)


def _tensor_guards(torch: Any) -> Callable[[Any, Any, Any], Callable[[Any, Any, Any], bool]] | None:
    """Makes a check of three tensors against three others; None where this torch has none that works."""
    make: Any = getattr(_dynamo_guards(torch), "TensorGuards", None)

    def guards(q: Any, k: Any, v: Any) -> Callable[[Any, Any, Any], bool]:
        check: Callable[[Any, Any, Any], bool] = make(q, k, v, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check

    try:
        one, two, three, longer = torch.empty(2), torch.empty(2), torch.empty(2), torch.empty(3)
        check = guards(one, two, three)
        works = check(three, one, two) is True and check(one, two, longer) is False
    except (AttributeError, TypeError, RuntimeError):  # not there, or its interface has changed
        return None
    return guards if works else None


def _empty_on_current_device(torch: Any) -> Callable[[Any, Any, Any], Any]:
    """The quickest way to a new tensor of given shape, strides and dtype on the current device."""
    if quick := getattr(_dynamo_guards(torch), "_empty_strided_cuda", None):  # what code compiled by torch itself calls
        found: Callable[[Any, Any, Any], Any] = quick
        return found

    def empty(shape: Any, strides: Any, dtype: Any) -> Any:
        return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")

    return empty


def _current_stream(torch: Any) -> Callable[[int], int]:
    """The quickest way to torch's current stream of a device."""
    if raw := getattr(torch._C, "_cuda_getCurrentRawStream", None):
        found: Callable[[int], int] = raw
        return found

    def current(device: int) -> int:
        stream: int = torch.cuda.current_stream(device).cuda_stream
        return stream

    return current


def make_kind() -> TorchArrays:
    import torch

    return TorchArrays(torch, CudaLayer.shared())

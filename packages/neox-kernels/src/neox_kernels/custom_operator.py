"""Custom operators with two ways to be called: through PyTorch's dispatcher, and directly.

The dispatcher costs several times what a launch takes, so an eager call on ordinary tensors does without
it: it calls the implementation, within an autograd function if a gradient is required. What must see an
operator as one node gets the `torch.library` operator: torch.compile and export, dispatch modes (FLOP
counters, fake tensors, selective checkpointing), tensor subclasses, torch.func, and torch.jit.trace.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

__all__ = ["CustomOperator", "custom_operator"]

# As torch.library's: save what backward needs of inputs and outputs; compute the gradients of the inputs.
Keep = Callable[[Any, tuple[Any, ...], Any], None]
Differentiate = Callable[..., Any]

_ORDINARY = (Tensor, torch.nn.Parameter)

# Each eager call asks these: as global names, without Python code of torch.
_num_modes = torch._C._len_torch_dispatch_stack
_has_transforms = torch._C._are_functorch_transforms_active
_is_traced = torch._C._is_tracing


def custom_operator(
    name: str, *, mutates_args: Iterable[str] = (), returned: int | None = None, like: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], "CustomOperator"]:
    """Make a custom operator of an implementation for the CPU and for NVIDIA GPUs.

    Args:
        name: the operator's name; without a namespace, `neox_kernels::name`.
        mutates_args: names of the arguments that the implementation changes.
        returned: number of results that a call returns; backward uses the others. None: all.
        like: names of the arguments whose sizes and dtypes the results have, for tracing; the result for an
            argument that is None is empty. Without names, use `register_fake`.
    """

    def decorate(implementation: Callable[..., Any]) -> CustomOperator:
        return CustomOperator(name, implementation, tuple(mutates_args), returned, like)

    return decorate


class CustomOperator:
    """A function of tensors with an implementation for eager calls and an operator of `torch.library`."""

    def __init__(
        self,
        name: str,
        implementation: Callable[..., Any],
        mutates_args: tuple[str, ...],
        returned: int | None,
        like: Sequence[str],
    ) -> None:
        namespace, own_name = f"neox_kernels::{name}".split("::")[-2:]
        self._name, self._implementation = own_name, implementation
        self._returned = returned
        self._definition = torch.library.custom_op(
            f"{namespace}::{own_name}",
            implementation,
            mutates_args=mutates_args,
            device_types=("cpu", "cuda"),
        )
        self._overload = getattr(getattr(torch.ops, namespace), own_name).default
        arguments = [argument.name for argument in self._overload._schema.arguments]
        self._mutated = tuple(map(arguments.index, mutates_args))
        self._apply: Callable[..., Any] = self._dispatched
        if like:
            self.register_fake(partial(_empty_results, [*map(arguments.index, like)]))

    def register_fake(self, fake: Callable[..., Any]) -> None:
        """Register the function that returns results without values, for tracing."""
        self._definition.register_fake(fake)

    def register_autograd(self, differentiate: Differentiate, *, setup_context: Keep) -> None:
        """Register the gradient, as with `torch.library.register_autograd`."""
        keep = setup_context if self._returned is None else _without_zeros(setup_context)
        self._definition.register_autograd(differentiate, setup_context=keep)
        function = _autograd_function(
            self._name, self._implementation, differentiate, setup_context, self._returned
        )
        # Without Function.apply, whose Python code for torch.func takes as long as the rest of the call.
        self._apply = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def with_input(self, differentiate: Differentiate, *, setup_context: Keep) -> Callable[..., Any]:
        """Return a function that returns its first argument too, in front of the results.

        `differentiate` gets the gradient of this argument first, None if nothing used it, and can add it in
        the backward kernel; otherwise autograd would launch another kernel for the sum.

        Args:
            differentiate: as for `register_autograd`, with the gradient of the argument in front.
            setup_context: as for `register_autograd`.
        """

        def implementation(*args: Any) -> tuple[Any, ...]:
            # With a dispatch mode, call the operator of torch.library, so that the mode sees it.
            run = self._overload if _num_modes() else self._implementation
            return (args[0], *run(*args))

        def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
            ctx.set_materialize_grads(False)
            setup_context(ctx, inputs, output[1:])

        assert self._returned is not None
        function = _autograd_function(self._name, implementation, differentiate, keep, self._returned + 1)
        apply = super(torch.autograd.Function, function).apply  # type: ignore[misc]

        def call(*args: Any) -> tuple[Any, ...]:
            if not _needs_one_node() and _requires_gradient(args):
                results: tuple[Any, ...] = apply(*args)
                return results
            results = self(*args)
            return (args[0], *results) if isinstance(results, tuple) else (args[0], results)

        return call

    def refuse_gradient(self) -> None:
        """Make a second derivative, backward through this operator's results, an error with a remedy."""

        def fail(*_: Any) -> NoReturn:
            raise NotImplementedError(
                f"neox_kernels::{self._name}: the fused operators have no second derivatives; use the "
                "reference implementation of this operator instead"
            )

        self._definition.register_autograd(fail)

    def __call__(self, *args: Any) -> Any:
        """Compute the results."""
        # A compiler, a tracer, a dispatch mode or a function transform must see the operator.
        if _needs_one_node() or _num_modes():
            return self._dispatched(*args)
        requires_gradient = _requires_gradient(args)
        if requires_gradient is None:
            return self._dispatched(*args)
        if requires_gradient:
            return self._apply(*args)
        results = self._implementation(*args)
        for position in self._mutated:
            torch.autograd.graph.increment_version(args[position])
        return _first(results, self._returned)

    def _dispatched(self, *args: Any) -> Any:
        return _first(self._overload(*args), self._returned)


def _first(results: Any, count: int | None) -> Any:
    """Return the first results: all, one, or several as a tuple."""
    if count is None:
        return results
    return results[0] if count == 1 else results[:count]


def _empty_results(places: Sequence[int], *args: Any) -> Any:
    """Return contiguous results without values, each like the argument at its place."""
    results = tuple(
        args[0].new_empty(0)
        if args[place] is None
        else torch.empty_like(args[place], memory_format=torch.contiguous_format)
        for place in places
    )
    return results if len(results) > 1 else results[0]


def _needs_one_node() -> bool:
    """Return whether a compiler, a tracer or a function transform is active."""
    return torch.compiler.is_compiling() or _has_transforms() or _is_traced()


def _requires_gradient(args: tuple[Any, ...]) -> bool | None:
    """Return whether autograd records a call; None if an argument is a subclass of tensors."""
    requires_grad = False
    for arg in args:
        kind = type(arg)
        if kind in _ORDINARY:
            requires_grad = requires_grad or arg.requires_grad
        elif isinstance(arg, Tensor):
            return None
    return requires_grad and torch.is_grad_enabled()


def _without_zeros(keep: Keep) -> Keep:
    """Allocate no zeros as gradients of results that only backward uses."""

    def keep_without_zeros(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        keep(ctx, inputs, output)

    return keep_without_zeros


def _autograd_function(
    name: str,
    implementation: Callable[..., Any],
    differentiate: Differentiate,
    keep: Keep,
    returned: int | None,
) -> type[torch.autograd.Function]:
    def forward(ctx: Any, *args: Any) -> Any:
        results = implementation(*args)
        keep(ctx, args, results)
        return _first(results, returned)

    members = {"forward": staticmethod(forward), "backward": staticmethod(differentiate)}
    return type(f"neox_kernels::{name}", (torch.autograd.Function,), members)

"""C++ that a signature makes: the entry of a kernel whose body takes structures, and assertions on
structures that a kernel takes by value."""

from __future__ import annotations

from kernelseam.kernels.signature import Signature, Structure

_ARGUMENT = """template<int N, class F> struct Argument;
template<class R, class A, class... More> struct Argument<0, R(A, More...)> { typedef A type; };
template<class R, class A, class... More>
struct Argument<0, R(const A&, More...)> { typedef A type; };
template<int N, class R, class A, class... More>
struct Argument<N, R(A, More...)> : Argument<N - 1, R(More...)> {};"""
"""The type of a function's parameter, without a reference."""


def entry(kernel: str, source: str, signature: Signature) -> str:
    """A translation unit: the source, which has the function ``<kernel>_body`` behind KS_BODY, and
    the kernel, which takes the signature's parameters: what the body takes beyond them has a
    default. Where the signature is flat, it takes each member of a structure by itself, as a
    parameter of the member's own type, and hands whole structures to the body. Compilers leave
    structures that a kernel takes by value in memory, and take more registers for them.

    A member that only the host has does not compile, nor one that only the device source has, where
    the structure grows by it.
    """
    types, parameters, body, call = [_ARGUMENT], list[str](), list[str](), list[str]()
    for i, (name, kind) in enumerate(signature.parameters):
        types.append(f"typedef Argument<{i}, decltype({kernel}_body)>::type Argument{i};")
        call.append(name)
        if not isinstance(kind, Structure) or not signature.flat:
            where = "KS_ARGUMENT " if kind == "tensor_map" else ""
            parameters.append(f"{where}Argument{i} {name}")
            continue
        types.append(f'static_assert(sizeof(Argument{i}) == {kind.size}, "size of {name}");')
        body.append(f"  Argument{i} {name};")
        for member, _, _ in kind.places:
            parameter = f"{name}_{member.replace('.', '_')}"
            parameters.append(f"decltype(((Argument{i}*)0)->{member}) {parameter}")
            body.append(f"  {name}.{member} = {parameter};")
    return "\n".join(
        [
            f'#include "{source}"',
            *types,
            "KS_KERNEL(BODY_THREADS, BODY_BLOCKS)",
            f"{kernel}({', '.join(parameters)}) {{",
            *body,
            f"  {kernel}_body({', '.join(call)});",
            "}\n",
        ]
    )


def assertions(kernel: str, signature: Signature) -> str:
    """What compiles behind a kernel's source only where every structure that it takes by value has
    the size, and each member the name, offset and size, that the host packs. Binaries tell no more
    of a structure than its size."""
    lines = [_ARGUMENT]
    for i, (_, kind) in enumerate(signature.parameters):
        if not isinstance(kind, Structure):
            continue
        lines.append(f"typedef Argument<{i}, decltype({kernel})>::type Argument{i};")
        lines.append(f'static_assert(sizeof(Argument{i}) == {kind.size}, "size of {i}");')
        for name, at, size in kind.places:
            offset = f"__builtin_offsetof(Argument{i}, {name}) == {at}"
            width = f"sizeof(((Argument{i}*)0)->{name}) == {size}"
            lines.append(f'static_assert({offset} && {width}, "{name} of {i}");')
    return "\n".join(lines) + "\n"

"""C++ that a signature makes: the entry of a kernel whose body takes structures."""

from __future__ import annotations

from kernelseam.kernels.signature import Signature, Structure

_PARAMETERS = """template<class F> struct ParametersOf;
template<class R, class A, class... More>
struct ParametersOf<R(A, More...)> { typedef A first; typedef R others(More...); };
template<class R, class A, class... More>
struct ParametersOf<R(const A&, More...)> { typedef A first; typedef R others(More...); };"""
"""The type of a function's first parameter, without a reference, and the function of the others: an
index into all of them would be as many instantiations for each."""


def entry(kernel: str, source: str, signature: Signature) -> str:
    """A translation unit: the source, which has the function ``<kernel>_body`` behind KS_BODY, and
    the kernel, which takes the signature's parameters. Where the signature is flat, it takes each
    member of a structure by itself, as a parameter of the member's own type, and hands whole
    structures to the body. Compilers leave structures that a kernel takes by value in memory, and
    take more registers for them.

    A member that only the host has does not compile, nor one that only the device source has, where
    the structure grows by it.
    """
    types, parameters, body, call = [_PARAMETERS], list[str](), list[str](), list[str]()
    left = f"decltype({kernel}_body)"
    fixed = [(n, k) for n, k in signature.parameters if n not in signature.optional]
    given = dict(signature.parameters)
    optional = [(name, given.get(name)) for name in signature.optional]
    assert (*fixed, *((n, k) for n, k in optional if k)) == signature.parameters, "in their order"
    for i, (name, kind) in enumerate([*fixed, *optional]):
        types.append(f"typedef ParametersOf<{left}> Left{i}; typedef Left{i}::first Argument{i};")
        left = f"Left{i}::others"
        call.append(name if kind else f"Argument{i}{{}}")
        if kind is None:
            continue
        if isinstance(kind, Structure):
            types.append(f'static_assert(sizeof(Argument{i}) == {kind.size}, "size of {name}");')
        if not isinstance(kind, Structure) or not signature.flat:
            types += _places(f"Argument{i}", name, kind)
            whole = kind == "tensor_map" or (isinstance(kind, Structure) and signature.in_place)
            where = "KS_ARGUMENT " if whole else ""
            parameters.append(f"{where}Argument{i} {name}")
            continue
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


def _places(argument: str, name: str, kind: str | Structure) -> list[str]:
    """Assertions that a structure which is taken by value has each member where the host packs it.
    Binaries tell no more of a structure than its size."""
    if not isinstance(kind, Structure):
        return []
    return [
        f"static_assert(KS_OFFSET({argument}, {member}) == {at} && "
        f'sizeof((({argument}*)0)->{member}) == {size}, "{member} of {name}");'
        for member, at, size in kind.places
    ]

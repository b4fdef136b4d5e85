"""The order of fences, waits and arrivals in a kernel's PTX: what neither results nor the assembler
always show.

The PTX of nvrtc has a kernel's inline assembly in the order of its blocks. The rules are about what
stands between two instructions there, and hold where the path between them is straight, as in a
kernel's steps. They know no registers: of two rings that are handed back after one wait, they do
not know which.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kernelseam.contract import SourceBundle
from kernelseam_cuda import bindings

WORDS = {
    "init": r"mbarrier\.init\.",
    "init fence": r"fence\.mbarrier_init\.",
    "arrive": r"mbarrier\.arrive\.shared::cta",
    "expect": r"mbarrier\.arrive\.expect_tx",
    "distant arrive": r"mbarrier\.arrive\.shared::cluster",
    "cluster meeting": r"barrier\.cluster\.wait",
    "meeting": r"bar(?:rier)?\.(?:cta\.)?(?:sync|arrive|red)",
    "warp meeting": r"bar\.warp\.sync",
    "await": r"mbarrier\.try_wait",
    "fragment": r"stmatrix\.",
    "fragment load": r"ldmatrix\.|ld\.shared::cta\.v2\.f32",
    "plain store": r"st\.(?:volatile\.)?shared\.v[24]",
    "proxy fence": r"fence\.proxy\.async",
    "bulk store": r"cp\.(?:reduce\.)?async\.bulk\.tensor\.\S*\.global\.shared",
    "bulk commit": r"cp\.async\.bulk\.commit_group",
    "bulk read": r"cp\.async\.bulk\.wait_group\.read (?P<read>\d+)",
    "bulk wait": r"cp\.async\.bulk\.wait_group (?P<bulk>\d+)",
    "product": r"wgmma\.mma_async",
    "product fence": r"wgmma\.fence",
    "commit": r"wgmma\.commit_group",
    "products wait": r"wgmma\.wait_group\.sync\.aligned (?P<products>\d+)",
    "exit": r"\bret;",
}
_EACH = "|".join(f"(?P<{w.replace(' ', '_')}>{p})" for w, p in WORDS.items())
_WORD = re.compile(rf"(?=[bcflmrsw])(?:{_EACH})")
"""Asked of the letters alone with which they begin: a text has a million others."""


def ptx(bundle: SourceBundle) -> str:
    """A bundle's PTX for sm_90a. Raises AssertionError with the log where it does not compile."""
    nvrtc = bindings.nvrtc()
    names, texts = [n.encode() for n, _ in bundle.files], [t.encode() for _, t in bundle.files]
    status, program = nvrtc.nvrtcCreateProgram(
        bundle.text().encode(), b"unit.cu", len(names), texts, names
    )
    assert not int(status)
    options = [o.encode() for o in ("--gpu-architecture=compute_90a", *bundle.options)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert not int(status), log.decode()
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = bytearray(size)
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    return text.decode()


def steps(text: str) -> Iterator[tuple[str, int]]:
    """The words of a PTX text in their order, each with its number, if it has one."""
    for result in _WORD.finditer(text):
        assert result.lastgroup is not None
        number = result["read"] or result["bulk"] or result["products"]
        yield result.lastgroup.replace("_", " "), int(number or 0)


def violations(
    text: str,
    panels: int = 1,
    ahead: int = 0,
    handed: bool = False,
    exchanged: bool = False,
    gathered: bool = False,
    copied: bool = True,
) -> list[str]:
    """What is out of order.

    ``panels``: of the staging memory, so many may be on their way out while another is written.
    ``ahead``: groups of products that may still run where a new step begins. ``handed``: an
    arrival tells of what was stored to or read from shared memory, which others read or write.
    ``exchanged``: so does a meeting, of fragments that others multiply or have multiplied; factors
    may be ``copied`` by threads; a step's scores begin in two parts; and what a warp stores right
    behind a meeting of its own is for itself. ``gathered``: one thread arrives for all warps that
    read fragments, or that wait.
    """
    results: list[str] = []

    def rule(holds: bool, what: str) -> None:
        if not holds and what not in results:
            results.append(what)

    created = True  # whether a fence followed the barriers that were made
    plain = laid = True  # and plain stores to shared memory, and fragments
    read = True  # and reads of fragments, where TMA writes next
    met = True  # whether those who read fragments met since
    fenced = True  # and copies that a barrier told of, before the products that read them
    started = False  # whether registers are fenced for products
    waited = True  # for all that leaves shared memory
    together = True  # since a barrier of another block was arrived at
    running = begun = leaving = 0  # groups of products, all and of this step; groups of stores
    given = False  # whether fragments were written since the last meeting, which hands them over
    own = False  # whether a warp has just met, and then done nothing but store
    last = ""
    for word, number in steps(text):
        own = word == "warp meeting" or (own and word == "plain store")
        if word == "init":
            created = False
        elif word == "init fence":
            created = True
        elif word in ("meeting", "cluster meeting"):
            rule(created, "no fence between barriers that are made and the block's meeting")
            rule(
                plain,
                "no proxy fence between stores to shared memory and the meeting of those who "
                "made them",
            )
            rule(read, "no proxy fence between fragments that were read and the meeting of readers")
            if exchanged:
                rule(laid, "no proxy fence between fragments and the meeting that hands them over")
                rule(running == 0 or given, "fragments are given back while products read them")
                given = False
            met = True
            together = together or word == "cluster meeting"
        elif word == "await":
            fenced = not (exchanged and copied)
        elif word == "fragment":
            laid, given = False, True
            rule(leaving < panels, "a panel is written while stores from it have not been read")
            rule(running == 0, "results are stored while products run")
        elif word == "fragment load":
            read = met = False
        elif word == "plain store":
            plain = plain and exchanged and own
        elif word == "proxy fence":
            plain = laid = read = fenced = True
        elif word == "bulk store":
            rule(
                plain and laid,
                "no proxy fence between stores to shared memory and TMA's reading of it",
            )
            waited = False
        elif word == "bulk commit":
            leaving += 1
        elif word in ("bulk read", "bulk wait"):
            leaving = min(leaving, number)
            waited = waited or word == "bulk wait"
        elif word == "product fence":
            rule(running <= ahead + exchanged, "a step begins while products of the one before run")
            if not (exchanged and running == 1):  # the second part of the same step
                begun, running = 0, max(running, ahead)  # as in a loop's later turns
            started = True
        elif word == "product":
            rule(fenced, "no proxy fence between copies by threads and the products that read them")
            rule(started, "no fence between registers written and the products that use them")
        elif word == "commit":
            running, begun = running + 1, begun + 1
        elif word == "products wait":
            running, started = min(running, number), False
        elif word == "expect":
            plain = True  # what was stored before is for those who wait, not for TMA
        elif word in ("arrive", "distant arrive"):
            rule(
                (laid and plain) or not handed,
                "no proxy fence between fragments and the arrival that hands them over",
            )
            rule(
                not running or running < begun + ahead,
                "a slot is handed back while products read it",
            )
            rule(
                read or not handed,
                "no proxy fence between fragments that were read and the arrival that lets TMA in",
            )
            rule(
                met or not gathered,
                "a slot is handed back before all who read fragments there have met",
            )
            rule(
                last != "await" or not gathered,
                "a slot is handed back before all who wait for it have met",
            )
            plain, together = True, together and word == "arrive"
        elif word == "exit":
            rule(waited, "a block ends with stores on their way")
            rule(together, "a block ends while others may arrive at its barriers")
        last = word
    return results

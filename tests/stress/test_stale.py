"""No stale artifact: one input is changed between two fresh processes with one cache.

The second answer must be the new one, or both are errors that name what the key does not cover.
All cases of a kind share the two processes.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers import H100, ran

pytestmark = [pytest.mark.long, pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")]
DRIVER = """
import hashlib, json, logging, pathlib, sys
import torch, jitkern
from torch.utils import cpp_extension
from jitkern import jit
from jitkern.launch.declared import declared_in
from jitkern.source import includes
from jitkern.source.kinds import Cuda, Extension, Triton, Variant
from jitkern.target import Target

H100 = Target.parse("OF_AN_H100")
cases, includes.SITE = json.loads(pathlib.Path(sys.argv[1]).read_text()), sys.argv[2]

def built(source, function, target, **more):
    entry = jit.ensure(Variant("stale::k", source, function, **more), target)
    return hashlib.sha256(entry.read(entry.manifest.meta["artifact"])).hexdigest()

def cpp(folder, told):
    out = torch.zeros(1, dtype=torch.int64)
    jitkern.cpp_kernel(f"{folder}/{told.pop('file', 'k.cpp')}", "answer", **told)(out)
    return str(int(out))

def cuda(folder, told):
    return built(Cuda("k.cu", folder=folder, **told), "k", H100)

def triton(folder, told):
    sys.path[:0] = told.pop("path", [])
    source = Triton("k.py", folder=folder, **told)
    facts = declared_in("stale::k", source, "k", H100).facts
    return built(source, "k", H100, signature=("*i32:16",), facts=facts)

def extension(folder, told):
    return built(Extension("k.cpp", folder=folder, function="answer", **told), "", Target.current("cpu"))

def inline(folder, told):
    text = pathlib.Path(folder, "k.cpp").read_text()
    name = pathlib.Path(folder).parents[1].name
    return str(jitkern.load_inline(name, text, no_implicit_headers=True, **told).answer())

def load(folder, told):
    name = pathlib.Path(folder).parents[1].name
    return str(jitkern.load(name, f"{folder}/k.cpp", **told).answer())

said = []
logging.getLogger("jitkern").addHandler(type("Said", (logging.Handler,), {"emit": lambda self, record: said.append(record.getMessage())})())

def by_torch(*args, **keywords):
    raise RuntimeError(said[-1])

cpp_extension.load = cpp_extension.load_inline = by_torch
answers = {}
for name, (kind, folder, told) in cases.items():
    try:
        answers[name] = globals()[kind](folder, told)
    except Exception as e:
        answers[name] = f"{type(e).__name__}: {e}"
print(json.dumps(answers))
"""
CPP = '#include <cstdint>\n%s\nextern "C" void answer(int64_t* out) { out[0] = V; }\n'
MODULE = """
#include <Python.h>
%s
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(V); }
static PyMethodDef methods[] = {{"answer", answer, METH_VARARGS, nullptr}, {}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "m", nullptr, -1, methods};
#define CONCAT(a, b) a##b
#define INIT(name) CONCAT(PyInit_, name)
extern "C" __attribute__((visibility("default"))) PyObject* INIT(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""
CUDA = "%s\n__global__ void k(int* out) { *out = V; }\n"
TRITON = "import triton\nimport triton.language as tl\n%s\n@triton.jit\ndef k(out):\n    tl.store(out, V)\n"
SOURCES = {"cpp": ("k.cpp", CPP), "extension": ("k.cpp", MODULE), "inline": ("k.cpp", MODULE),
           "load": ("k.cpp", MODULE), "cuda": ("k.cu", CUDA), "triton": ("k.py", TRITON)}  # fmt: skip
ASSEMBLY = 'asm(".pushsection .rodata\\n.global %s\\n%s: %s\\n.popsection");\nextern "C" const signed char %s[] __attribute__((visibility("hidden")));\n#define V *%s'
ONE, TWO = "#define V 1\n", "#define V 2\n"
HEADER = {"o/v.h": ONE}
OTHER = {"o/v.h": TWO}


class Case(NamedTuple):
    """What a kernel is made of, and what changes.

    head: goes into the kernel's text. files, changed: what they hold; `-> x` is a link to x, and a
    name that ends in `/` is a folder. told: how it is asked for. refused: a pattern of what both
    errors say; then: the second answer where both are none.
    """

    head: str
    files: dict[str, str]
    changed: dict[str, str]
    told: dict[str, Any] = {}  # noqa: RUF012  nobody writes into it
    refused: str = ""
    then: str = "2"


def blob(read: str, name: str = "blob") -> str:
    return ASSEMBLY % (name, name, read, name, name)


PROBE = "#if %s\n#define V 2\n#else\n#define V 1\n#endif"
THING = 'extern "C" int thing(void);\n#define V thing()'
THINGS: dict[str, str] = {"o/f.c": "int thing(void) { return 1; }"}
OTHER_THINGS: dict[str, str] = {"o/f.c": "int thing(void) { return 2; }"}
EVERY = ["-Wl,--whole-archive", "{o}/libthing.a", "-Wl,--no-whole-archive"]
# `{d}` is the kernel's folder, `{a}` the one above it, `{o}` one that nothing declares, `{c}` one that variables name, and
# `{s}` stands for /usr/local/include. Of each `.c` an object and an archive are made.
HEADERS = {
    "source": Case(ONE, {}, {"d/SOURCE": TWO}),
    "two_down": Case('#include "a.h"', {"d/a.h": '#include "sub/b.h"', "d/sub/b.h": ONE}, {"d/sub/b.h": TWO}),
    "absolute": Case('#include "{o}/v.h"', HEADER, OTHER),
    "upwards": Case('#include "../../o/v.h"', HEADER, OTHER),
    "continued_name": Case('#inc\\\nlude "v\\\n.h"', {"d/v.h": ONE}, {"d/v.h": TWO}),
    "digraph": Case('/* a\n*/ %: /* b */ include /* c */ "v.h"', {"d/v.h": ONE}, {"d/v.h": TWO}),
    "in_an_earlier_folder": Case(
        "#include <v.h>", {"d/i1/": "", "d/i2/v.h": ONE}, {"d/i1/v.h": TWO}, {"include": ["{d}/i1", "{d}/i2"]}
    ),
    "beside": Case('#include "v.h"', {"d/i2/v.h": ONE}, {"d/v.h": TWO}, {"include": ["{d}/i2"]}),
    "include_next": Case(
        "#include <v.h>", {"d/i1/v.h": "#include_next <v.h>", "d/i2/v.h": ONE}, {"d/i2/v.h": TWO},
        {"include": ["{d}/i1", "{d}/i2"]},
    ),
    "link_to_another": Case('#include "l.h"', {"d/l.h": "-> {o}/a.h", "o/a.h": ONE, "o/b.h": TWO}, {"d/l.h": "-> {o}/b.h"}),
    "through_a_linked_folder": Case(
        '#include "cur/x.h"', {"d/cur": "-> {d}/o1", "d/o1/x.h": '#include "../y.h"', "d/y.h": ONE}, {"d/y.h": TWO}
    ),
    "named_by_a_macro": Case('#define H "v.h"\n#include H', {"d/v.h": ONE}, {"d/v.h": TWO}),
    "probed": Case(PROBE % '__has_include("o.h")', {}, {"d/o.h": ""}),
    "probed_by_a_macro": Case('#define O "o.h"\n' + PROBE % "__has_include(O)", {}, {"d/o.h": ""}, refused="of a macro"),
    "probed_after_a_comment": Case(PROBE % '__has_include /* c */ ("o.h")', {}, {"d/o.h": ""}),
    "probed_by_a_macro_elsewhere": Case(
        "#define O <o.h>\n" + PROBE % "__has_include(O)", {"o/": ""}, {"o/o.h": ""}, {"include": ["{o}"]}, "of a macro"
    ),
    "probed_absolute": Case(PROBE % '__has_include("{o}/o.h")', {}, {"o/o.h": ""}),
}  # fmt: skip
OUTSIDE = {
    "by_a_macro": Case('#define H "{o}/v.h"\n#include H', HEADER, OTHER, refused="v.h"),
    "pasted_name": Case(
        "#define S(x) #x\n#define P(x) S(x/v.h)\n#include P({o})", HEADER, OTHER, refused="v.h"
    ),
    "continued_absolute": Case('#inc\\\nlude "\\\n{o}/v.h"', HEADER, OTHER),
    "probed_pasted": Case(
        "#define S(x) #x\n#define P(x) S(x/o.h)\n" + PROBE % "__has_include(P({o}))",
        {"o/": ""},
        {"o/o.h": ""},
        refused="of a macro",
    ),
}
FLAGS = {
    "flag_I": Case("#include <v.h>", HEADER, OTHER, {"flags": ["-I{o}"]}),
    "flag_I_probed": Case(PROBE % "__has_include(<o.h>)", {"o/": ""}, {"o/o.h": ""}, {"flags": ["-I{o}"]}),
    "flag_I_hidden": Case("#include <v.h>", {"o/b/v.h": ONE}, {"o/a/v.h": TWO}, {"flags": ["-I{o}/a", "-I{o}/b"]}),
    "flag_isystem": Case("#include <v.h>", HEADER, OTHER, {"flags": ["-isystem", "{o}"]}),
    "flag_iquote": Case('#include "v.h"', HEADER, OTHER, {"flags": ["-iquote", "{o}"]}),
    "flag_idirafter": Case("#include <v.h>", HEADER, OTHER, {"flags": ["-idirafter", "{o}"]}),
    "flag_to_the_preprocessor": Case("#include <v.h>", HEADER, OTHER, {"flags": ["-Wp,-I,{o}"]}),
    "flag_to_the_preprocessor_probed": Case(PROBE % "__has_include(<o.h>)", {"o/": ""}, {"o/o.h": ""}, {"flags": ["-Wp,-I,{o}"]}),
    "flag_iprefix": Case("#include <v.h>", HEADER, OTHER, {"flags": ["-iprefix", "{o}/", "-iwithprefixbefore", "."]}),
    "flag_include": Case("", HEADER, OTHER, {"flags": ["-include", "{o}/v.h"]}),
    "flag_include_found": Case("", HEADER, OTHER, {"flags": ["-include", "v.h", "-I{o}"]}),
    "flag_imacros": Case("", HEADER, OTHER, {"flags": ["-imacros", "{o}/v.h"]}),
    "flag_macro_names_it": Case("#include H", HEADER, OTHER, {"flags": ['-DH="{o}/v.h"']}),
    "response_file": Case("", {"o/opts": "-DV=1"}, {"o/opts": "-DV=2"}, {"flags": ["@{o}/opts"]}, "flag `@"),
    "response_file_of_another": Case(
        "", {"o/opts": "@{o}/more", "o/more": "-DV=1"}, {"o/more": "-DV=2"}, {"flags": ["@{o}/opts"]}, "flag `@"
    ),
    "response_file_searches": Case("#include <v.h>", {"o/opts": "-I{o}", **HEADER}, OTHER, {"flags": ["@{o}/opts"]}, "flag `@"),
    "specs": Case("", {"o/specs": "*cc1plus:\n+ -DV=1\n\n"}, {"o/specs": "*cc1plus:\n+ -DV=2\n\n"}, {"flags": ["-specs={o}/specs"]}, "flag `-specs"),
    "profiles": Case(ONE, {"o/k.gcda": "1"}, {"o/k.gcda": "2"}, {"flags": ["-fprofile-use={o}"]}, "flag `-fprofile-use"),
    "profiles_elsewhere": Case(ONE, {"o/k.gcda": "1"}, {"o/k.gcda": "2"}, {"flags": ["-fprofile-use", "-fprofile-dir={o}"]}, "flag `-fprofile-use"),
    "precompiled": Case('#include "v.h"\n#define OTHER', {"d/v.h": ONE, "d/v.h.gch": "precompiled"}, {"d/v.h": TWO}, {}, "v.h.gch"),
    "precompiled_by_a_flag": Case("", {"o/v.h": ONE, "o/v.h.gch": "precompiled"}, {"o/v.h": TWO}, {"flags": ["-include", "{o}/v.h"]}, "v.h.gch"),
    "variable_for_the_assembler": Case(blob('.include \\"v.s\\"'), {"o/v.s": ".byte 1\n"}, {"o/v.s": ".byte 2\n"}, {"flags": ["-Wa,-I{o}"]}, "`.include`"),
}  # fmt: skip
LINKED = {
    "incbin": Case(blob('.incbin \\"b.bin\\"'), {"d/b.bin": "\1"}, {"d/b.bin": "\2"}, refused="`.incbin`"),
    "incbin_absolute": Case(blob('.incbin \\"{o}/b.bin\\"'), {"o/b.bin": "\1"}, {"o/b.bin": "\2"}, refused="`.incbin`"),
    "incbin_by_a_macro": Case(
        '#define B "{o}/b.bin"\n' + blob('.incbin \\"" B "\\"'), {"o/b.bin": "\1"}, {"o/b.bin": "\2"}, refused="`.incbin`"
    ),
    "incbin_pasted": Case(
        blob('.inc" "bin \\"{o}/b.bin\\"'), {"o/b.bin": "\1"}, {"o/b.bin": "\2"}, refused="b.bin"
    ),
    "incbin_by_the_linker": Case(
        blob('.inc" "bin \\"{o}/b.bin\\"'), {"o/b.bin": "\1"}, {"o/b.bin": "\2"}, {"flags": ["-flto"]}, "flag `-flto"
    ),
    "archive_by_its_path": Case(THING, THINGS, OTHER_THINGS, {"flags": EVERY}),
    "archive_by_its_name": Case(THING, THINGS, OTHER_THINGS, {"flags": ["-L{o}", "-lthing"]}, "libthing.a"),
    "archive_by_a_link": Case(THING, THINGS, OTHER_THINGS, {"flags": ["-L{o}", "-l:libthing.a"]}, "libthing.a"),
    "object_by_its_path": Case(THING, THINGS, OTHER_THINGS, {"flags": ["{o}/f.o"]}),
    "object_by_the_linkers_flag": Case(THING, THINGS, OTHER_THINGS, {"flags": ["-Wl,{o}/f.o"]}),
    "object_after_Xlinker": Case(THING, THINGS, OTHER_THINGS, {"flags": ["-Xlinker", "{o}/f.o"]}),
    "script_that_names_an_object": Case(
        THING, {**THINGS, "o/s.ld": "INPUT({o}/f.o)"}, OTHER_THINGS, {"flags": ["{o}/s.ld"]}, "f.o"
    ),
    "script_as_a_library": Case(
        THING, {**THINGS, "o/libs.so": "INPUT({o}/f.o)"}, OTHER_THINGS, {"flags": ["-L{o}", "-ls"]}, "libs.so|f.o"
    ),
    "version_script": Case(
        ONE, {"o/v.map": "{ global: answer; };"}, {"o/v.map": "{ global: x; local: *; };"},
        {"flags": ["-Wl,--version-script={o}/v.map"]}, then="Error",
    ),
}  # fmt: skip
OF_THE_MACHINE = {
    "site": Case("#include <site.h>", {"s/site.h": ONE}, {"s/site.h": TWO}),
    "site_probed": Case(PROBE % "__has_include(<asked.h>)", {"s/": ""}, {"s/asked.h": ""}),
    "site_probed_by_a_macro": Case("#define O <odd.h>\n" + PROBE % "__has_include(O)", {"s/": ""}, {"s/odd.h": ""}, {}, "of a macro"),
    "site_by_a_macro": Case("#define O <named.h>\n#include O", {"s/named.h": ONE}, {"s/named.h": TWO}, {}, "named.h"),
}  # fmt: skip
VARIABLES = {
    "variable_declared": Case("#include <v.h>", {"c/v.h": ONE}, {"c/v.h": TWO}, {"environment": ["CPATH"]}),
    "variable_of_c++": Case("#include <plus.h>", {"c/plus.h": ONE}, {"c/plus.h": TWO}, {"environment": ["CPLUS_INCLUDE_PATH"]}),
    "variable_probed": Case(PROBE % "__has_include(<p.h>)", {"c/": ""}, {"c/p.h": ""}, {"environment": ["CPATH"]}),
    "variable_undeclared": Case(PROBE % "__has_include(<u.h>)", {"c/": ""}, {"c/u.h": ""}, then="1"),
    "variable_of_the_linker": Case(
        THING, {"c/f.c": THINGS["o/f.c"]}, {"c/f.c": OTHER_THINGS["o/f.c"]},
        {"flags": ["-lthing"], "environment": ["LIBRARY_PATH"]}, "libthing.a",
    ),
}  # fmt: skip
CUDA_CASES = {
    **HEADERS,
    "by_a_macro": OUTSIDE["by_a_macro"],
    "flag_I": FLAGS["flag_I"],
    "flag_of_the_current_folder": Case("#include <rel.h>", {"c/rel.h": ONE}, {"c/rel.h": TWO}, {"flags": ["-Ivariables"]}, "rel.h"),
    "flag_pre_include": Case("", HEADER, OTHER, {"flags": ["--pre-include={o}/v.h"]}),
    "nvcc": Case('#include <cstdio>\n#include <string>\n#include "v.h"\n#include <v.h>', {"d/v.h": ONE}, {"d/v.h": TWO}),
    "nvcc_by_a_macro": Case('#include <string>\n#define H "{o}/v.h"\n#include H', HEADER, OTHER, refused="v.h"),
}  # fmt: skip
EXTENSIONS = {
    name: case
    for cases, names in (
        (HEADERS, ("two_down", "beside", "probed_by_a_macro", "probed_absolute")),
        (OUTSIDE, OUTSIDE),
        (FLAGS, ("flag_isystem", "profiles")),
        (LINKED, ("incbin", "incbin_absolute", "incbin_by_a_macro", "incbin_pasted")),
        (OF_THE_MACHINE, ("site", "site_probed", "site_by_a_macro")),
    )
    for name, case in cases.items()
    if name in names
}


def told_as_torch(case: Case) -> Case:
    """As `load_inline` and `load` are told; what is refused is for Torch, and its warning the answer."""
    return case._replace(told={TORCHS[name]: given for name, given in case.told.items()})


TORCHS = {"include": "extra_include_paths", "flags": "extra_cflags"}
CALLS = {
    name: told_as_torch(case)
    for name, case in {**HEADERS, **OUTSIDE, **FLAGS, **LINKED, **OF_THE_MACHINE}.items()
}
INLINE = {
    name: CALLS[name]
    for name in (
        "source", "absolute", "continued_absolute", "probed_by_a_macro_elsewhere", "probed_absolute",
        "probed_pasted", "by_a_macro", "pasted_name", "incbin_absolute", "incbin_by_a_macro",
        "incbin_pasted", "incbin_by_the_linker", "site", "site_probed", "site_probed_by_a_macro",
        "site_by_a_macro", "flag_include", "response_file_of_another", "specs",
    )
}  # fmt: skip
LOAD = {
    name: CALLS[name]
    for name in (
        "two_down", "beside", "in_an_earlier_folder", "link_to_another", "probed_by_a_macro",
        "probed_after_a_comment", "incbin_pasted", "site", "site_probed", "flag_I_hidden",
    )
}  # fmt: skip
LINKING = {
    name: case._replace(
        told={"extra_ldflags": case.told["extra_cflags"]},
        refused=case.refused if name.startswith("script") else "",  # libraries of -l are in the key
    )
    for name, case in CALLS.items()
    if name.startswith(("archive", "object", "script"))
}
FOREIGN = {"o/other.py": "import triton.language as tl\nV = tl.constexpr(1)\n"}
NEW_FOREIGN = {"o/other.py": "import triton.language as tl\nV = tl.constexpr(2)\n"}
ON_PATH = {"path": ["{o}"]}
OWN_PACKAGE = {"path": ["{d}/../.."], "package": "a.d"}
IN_PACKAGE = {"a/__init__.py": "", "d/__init__.py": ""}
DATA = {"o/data.json": '{"V": 1}'}
NEW_DATA = {"o/data.json": '{"V": 2}'}
TRITON_CASES = {
    "constant": Case("V = tl.constexpr(1)", {}, {"d/SOURCE": "V = tl.constexpr(2)"}),
    "beside": Case("from near import V", {"d/near.py": FOREIGN["o/other.py"]}, {"d/near.py": NEW_FOREIGN["o/other.py"]}, {"path": ["{d}"]}),
    "of_its_package": Case(
        "from .deep import V", {"d/deep.py": "from .deeper import *", "d/deeper.py": FOREIGN["o/other.py"], **IN_PACKAGE},
        {"d/deeper.py": NEW_FOREIGN["o/other.py"]}, OWN_PACKAGE,
    ),
    "other_package": Case("from other import V", FOREIGN, NEW_FOREIGN, ON_PATH, "other.py"),
    "other_module": Case("import other\nV = tl.constexpr(other.V.value + 1)", FOREIGN, NEW_FOREIGN, ON_PATH, "other.py"),
    "through_its_package": Case(
        "from .deep import V", {"d/deep.py": "from other import V", **FOREIGN, **IN_PACKAGE}, NEW_FOREIGN,
        {**OWN_PACKAGE, "path": ["{d}/../..", "{o}"]}, "other.py",
    ),
    "importlib": Case("import importlib\nV = importlib.import_module('other').V", FOREIGN, NEW_FOREIGN, ON_PATH, "importlib"),
    "data_file": Case("import json\nV = tl.constexpr(json.load(open('{o}/data.json'))['V'])", DATA, NEW_DATA, {}, "json"),
    "data_file_of_a_helper": Case(
        "from near import V",
        {"d/near.py": "import pathlib, triton.language as tl\nV = tl.constexpr(len(pathlib.Path('{o}/data.json').read_text()))", **DATA},
        {"o/data.json": '{"V": 22}'}, {"path": ["{d}"]}, "data.json",
    ),
    "condition": Case("import os\nV = tl.constexpr(1)\nif os.path.exists('{o}/x'):\n    V = tl.constexpr(2)", {"o/": ""}, {"o/x": ""}),
    "names": Case("import os\nV = tl.constexpr(len(os.listdir('{o}')))", {"o/": ""}, {"o/x": ""}),
    "jit_function": Case(
        "from other import f\nV = f", {"o/other.py": "import triton\n@triton.jit\ndef f(): pass\n"}, {"o/other.py": "import triton\n@triton.jit\ndef f():\n    return\n"},
        ON_PATH, "other.py",
    ),
}  # fmt: skip
KINDS = {
    "cpp": {**HEADERS, **OUTSIDE, **FLAGS, **LINKED, **OF_THE_MACHINE, **VARIABLES},
    "cuda": CUDA_CASES,
    "extension": EXTENSIONS,
    "inline": {**INLINE, **LINKING},
    "load": LOAD,
    "triton": TRITON_CASES,
}


class Run:
    """The two processes of a kind, and the answers of both."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.cases = KINDS[kind]
        (folder / "bin").mkdir()
        compiler = folder / "bin" / "g++"
        compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@" -isystem {folder}/site\n')
        compiler.chmod(0o755)
        for name, case in self.cases.items():
            self.write(name, {"d/SOURCE": case.head, **case.files})
        self.before = self.answers()
        for name, case in self.cases.items():
            self.write(name, case.changed)
        self.after = self.answers()

    def places(self, name: str) -> dict[str, str]:
        own = self.folder / self.kind / name
        return {
            "{d}": f"{own}/a/d", "{a}": f"{own}/a", "{o}": f"{own}/o",
            "{c}": f"{self.folder}/variables", "{s}": f"{self.folder}/site",
        }  # fmt: skip

    def filled(self, name: str, text: str) -> str:
        for mark, place in self.places(name).items():
            text = text.replace(mark, place)
        return text

    def write(self, name: str, files: dict[str, str]) -> None:
        source, form = SOURCES[self.kind]
        for file, content in files.items():
            root, _, below = file.partition("/")
            path = Path(self.filled(name, f"{{{root}}}"), source if below == "SOURCE" else below)
            (path if file.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
            text = self.filled(name, form % content if below == "SOURCE" else content)
            if text.startswith("-> "):
                path.unlink(missing_ok=True)
                path.symlink_to(text.removeprefix("-> "))
            elif text == "precompiled":
                options = ("-O3", "-fPIC", "-std=c++17", "-x", "c++-header")
                ran("g++", *options, path.with_suffix(""), "-o", path)
            elif not file.endswith("/"):
                path.write_text(text)
            if path.suffix == ".c":
                archive = "gcc -fPIC -c f.c && rm -f libthing.a && ar rcs libthing.a f.o"
                ran("sh", "-c", archive, cwd=path.parent)

    def answers(self) -> dict[str, str]:
        asked = {
            name: [
                self.kind,
                f"{self.folder}/{self.kind}/{name}/a/d",
                json.loads(self.filled(name, json.dumps(case.told))),
            ]
            for name, case in self.cases.items()
        }
        (self.folder / "asked.json").write_text(json.dumps(asked))
        (self.folder / "driver.py").write_text(DRIVER.replace("OF_AN_H100", H100))
        mine = {
            "JITKERN_CACHE_DIR": f"{self.folder}/cache", "CXX": f"{self.folder}/bin/g++",
            "CPATH": f"{self.folder}/variables", "CPLUS_INCLUDE_PATH": f"{self.folder}/variables",
            "LIBRARY_PATH": f"{self.folder}/variables",
        }  # fmt: skip
        if self.kind not in (
            "cpp",
            "cuda",
            "triton",
        ):  # calls of Torch's are for what variables say
            del mine["CPATH"], mine["CPLUS_INCLUDE_PATH"], mine["LIBRARY_PATH"]
        command = (sys.executable, "-W", "ignore", "driver.py", "asked.json", self.folder / "site")
        out = ran(*command, cwd=self.folder, env={**os.environ, **mine}, timeout=300)
        answers: dict[str, str] = json.loads(out.splitlines()[-1])
        return answers


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    made: dict[str, Run] = {}

    def run(kind: str) -> Run:
        if kind not in made:
            made[kind] = Run(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return run


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, cases in KINDS.items() for name in cases]
)
def test_the_second_process_answers_for_the_changed_input(runs, kind, name):
    case, run = KINDS[kind][name], runs(kind)
    before, after = run.before[name], run.after[name]
    if case.refused:
        for answer in (before, after):
            assert re.search(f"(?s)Error: .*({case.refused}).*cache key", answer)
    elif kind in ("cpp", "inline", "load"):
        assert before == "1"
        assert re.search(rf"^\w*{case.then}", after), after
    else:
        assert len(before) == len(after) == 64, (before, after)
        assert before != after

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from releases import described, listed, manifest_of

from moestream import __version__
from moestream.errors import MoestreamError
from moestream.upstream import bins, manifest
from moestream.upstream.machine import Machine, this_machine, version_numbers
from moestream.upstream.manifest import EngineEntry, misfits, parse, render
from moestream.upstream.releases import RELEASES_VARIABLE, resolve_origin

ENGINE = described()
MACHINE = Machine(
    os="linux", arch="x86_64", cpu_features=frozenset({"sse2", "avx2", "fma"}), glibc="2.36", nvidia_driver="580.65.06",
    gpu_capabilities=("8.6",), has_library=lambda name: name == "libvulkan.so.1",
)  # fmt: skip


def entry(**changes) -> EngineEntry:
    fields = {**listed(ENGINE, b"x"), "arch": "x86_64", **changes}
    return parse(json.dumps(manifest_of(fields)), "here").engines[0]


def reasons(engine: EngineEntry, machine: Machine = MACHINE) -> list[str]:
    return misfits(engine, machine, source=ENGINE.source, sources_sha256=ENGINE.sources_sha256)


# ---------------------------------------------------------------- reading


def test_written_and_read_back():
    read = parse(json.dumps(manifest_of(listed(ENGINE, b"x"), listed(described("cuda"), b"y"))), "here")
    assert [engine.backend for engine in read.engines] == ["cpu", "cuda"]
    assert parse(render(read), "here") == read
    assert json.loads(render(read))["schema"] == "moestream/engine-release/1"


def test_fields_that_later_versions_add_are_passed_over():
    assert parse(json.dumps(manifest_of({**listed(ENGINE, b"x"), "min_kernel": "5.4"}, signed_by="me")), "here").engines


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<html>", "here is not JSON: Expecting value"),
        ("", "here is not JSON"),
        (b"\xff\xfe\x00", "here is not JSON"),
        ("[" * 100_000, "here is not JSON"),
        ("[]", "its schema is None"),
        ('{"schema": "other/1"}', "its schema is 'other/1'"),
        ('{"schema": "moestream/engine-release/x"}', "its schema is 'moestream/engine-release/x'"),
        ('{"schema": ["moestream/engine-release/1"]}', "here is no manifest of engines"),
        ('{"schema": "moestream/engine-release/1"}', "here: moestream_version: Field required"),
        (json.dumps(manifest_of(engines=3)), "here: engines: Input should be a valid tuple"),
    ],
)  # fmt: skip
def test_what_is_no_manifest(text, message):
    with pytest.raises(MoestreamError) as caught:
        parse(text, "here")
    assert message in caught.value.message and "moestream build" in caught.value.hint


def test_a_newer_schema_says_that_it_is_newer():
    with pytest.raises(
        MoestreamError, match=r"schema moestream/engine-release/2, which is newer than this moestream reads"
    ) as e:
        parse(json.dumps(manifest_of(schema="moestream/engine-release/2")), "here")
    assert "moestream build" in e.value.hint


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", "../../x"), ("id", ".hidden"), ("id", ""), ("file", "/etc/passwd"), ("file", "a/b.tar.xz"), ("file", ".."),
        ("sha256", "abc"), ("sha256", "A" * 64), ("size_bytes", 0), ("size_bytes", -1), ("size_bytes", "12"), ("size_bytes", None),
        ("installed_bytes", 1.5), ("min_glibc", "new"), ("min_driver", "580."), ("gpu_archs", ["80"]), ("cpu_features", "avx2"),
        ("tools", []), ("tools", ["../sh"]), ("system_libraries", ["/lib/x.so"]), ("web_ui", 1),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(field, value):
    with pytest.raises(MoestreamError, match=rf"^here: engines\.0\.{field}"):
        entry(**{field: value})


@pytest.mark.parametrize("field", sorted(listed(ENGINE, b"x")))
def test_a_missing_field_is_named(field):
    fields = listed(ENGINE, b"x")
    del fields[field]
    with pytest.raises(MoestreamError, match=rf"^here: engines\.0\.{field}: Field required"):
        parse(json.dumps(manifest_of(fields)), "here")


@pytest.mark.parametrize("field", ["id", "file"])
def test_an_engine_twice(field):
    other = {**listed(described("cuda"), b"y"), field: listed(ENGINE, b"x")[field]}
    with pytest.raises(MoestreamError, match=f"two engines have the {field}"):
        parse(json.dumps(manifest_of(listed(ENGINE, b"x"), other)), "here")


# ---------------------------------------------------------------- what fits


def test_one_that_fits():
    assert reasons(entry(cpu_features=["avx2"], min_glibc="2.36", system_libraries=["libvulkan.so.1"])) == []
    assert reasons(entry(min_glibc=""), replace(MACHINE, glibc="")) == []


@pytest.mark.parametrize(
    ("changes", "machine", "reason"),
    [
        ({"arch": "aarch64"}, {}, "it is for linux on aarch64, this is linux on x86_64"),
        ({"os": "darwin"}, {}, "it is for darwin on x86_64, this is linux on x86_64"),
        ({"source": "0.0.1"}, {}, "it belongs to another version of moestream"),
        ({"sources_sha256": "0" * 64}, {}, "it belongs to another version of moestream"),
        ({"cpu_features": ["avx2", "fma"]}, {"cpu_features": frozenset({"fma"})}, "this processor lacks avx2"),
        ({"min_glibc": "2.100"}, {}, "it needs glibc 2.100, this system has 2.36"),
        ({}, {"glibc": ""}, "it needs glibc 2.17, and this system has another C library"),
        ({"min_driver": "580.65.07"}, {}, "it needs NVIDIA's driver 580.65.07, this system has 580.65.06"),
        ({"min_driver": "580", "gpu_archs": ["sm_90"]}, {"nvidia_driver": "", "gpu_capabilities": ()},
         "it needs NVIDIA's driver 580, and nvidia-smi finds none"),
        ({"gpu_archs": ["sm_75", "sm_90"]}, {}, "it has code for sm_75, sm_90, the GPUs here are sm_86"),
        ({"gpu_archs": ["sm_75"]}, {"gpu_capabilities": ()}, "it has code for sm_75, the GPUs here are none"),
        ({"system_libraries": ["libvulkan.so.1", "libamdhip64.so.6"]}, {}, "the system has no libamdhip64.so.6"),
    ],
)  # fmt: skip
def test_one_that_does_not_fit_says_why(changes, machine, reason):
    assert reasons(entry(**changes), replace(MACHINE, **machine)) == [reason]


@pytest.mark.parametrize(
    ("archs", "gpus", "fits"),
    [
        (["sm_80"], ["8.6"], True),  # the same generation, later
        (["sm_86"], ["8.0"], False),
        (["sm_80"], ["9.0"], False),
        (["compute_80"], ["9.0"], True),  # the driver compiles it
        (["compute_90"], ["8.9"], False),
        (["compute_90a"], ["10.0"], False),
        (["sm_90a"], ["9.0"], True),
        (["sm_120"], ["12.0"], True),
        (["sm_75"], ["6.1", "7.5"], True),  # one of two
        (["sm_75", "sm_80", "compute_90"], ["7.0"], False),  # what CUDA 13 left behind
    ],
)
def test_which_gpus_code_runs_on(archs, gpus, fits):
    found = reasons(entry(gpu_archs=archs), replace(MACHINE, gpu_capabilities=tuple(gpus)))
    assert (found == []) == fits


def test_versions_compare_by_number():
    assert version_numbers("2.9") < version_numbers("2.36") < version_numbers("2.36.1") and version_numbers("") == ()


def test_this_machine_is_what_the_system_says():
    machine = this_machine()
    assert machine.os == "linux" and machine.arch and machine.cpu_features
    assert version_numbers(machine.glibc) > (2, 0)
    assert machine.has_library("libc.so.6") and not machine.has_library("libnowhere.so.1")


def test_what_nvidia_smi_says(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    for script, expected in (
        ("echo '580.65.06, 9.0'; echo '580.65.06, 8.6'", ("580.65.06", ("9.0", "8.6"))),
        ("echo 'NVIDIA-SMI has failed'; exit 9", ("", ())),
        ("echo 'Field \"compute_cap\" is not a valid field to query.'", ("", ())),
    ):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        machine = this_machine()
        assert (machine.nvidia_driver, machine.gpu_capabilities) == expected


# ---------------------------------------------------------------- which one is taken


def choose(entries, backend=None, **machine):
    return bins.choose(parse(json.dumps(manifest_of(*entries)), "here"), replace(MACHINE, **machine), backend, "here")


def fields(backend: str, **changes):
    return {**listed(described(backend), b"x"), "arch": "x86_64", **changes}


def test_cuda_before_the_cpu_and_of_two_the_one_for_the_newer_driver():
    older = fields("cuda", id="cuda-12", file="12", min_driver="525.60.13", gpu_archs=["sm_86"])
    newer = fields("cuda", id="cuda-13", file="13", min_driver="580", gpu_archs=["sm_86"])
    everything = [fields("cpu"), older, newer]
    assert choose(everything)[0].id == "cuda-13"
    taken, passed_over = choose(everything, nvidia_driver="570.1")
    assert taken.id == "cuda-12"
    assert passed_over == {"cuda-13": ["it needs NVIDIA's driver 580, this system has 570.1"]}
    assert choose(everything, nvidia_driver="", gpu_capabilities=())[0].backend == "cpu"
    assert choose(everything, backend="cpu")[0].backend == "cpu"


def test_vulkan_is_taken_only_when_asked_for():
    everything = [fields("vulkan", system_libraries=["libvulkan.so.1"]), fields("cpu")]
    assert choose(everything)[0].backend == "cpu"
    assert choose(everything, backend="vulkan")[0].backend == "vulkan"
    with pytest.raises(MoestreamError, match=r"^no engine of here for cuda or cpu fits this machine$") as caught:
        choose(everything[:1])
    assert "--backend vulkan" in caught.value.hint


def test_none_fits_and_each_says_why():
    with pytest.raises(MoestreamError) as caught:
        choose([fields("cpu", id="a", min_glibc="2.38"), fields("cuda", id="b", file="b", arch="aarch64")])
    assert caught.value.message == (
        "no engine of here fits this machine:\n  a: it needs glibc 2.38, this system has 2.36\n"
        "  b: it is for linux on aarch64, this is linux on x86_64"
    )
    assert caught.value.hint == "moestream build makes one that does"


@pytest.mark.parametrize(("entries", "has"), [([], "none at all"), ([fields("cpu")], "cpu")])
def test_a_backend_that_the_release_lacks(entries, has):
    with pytest.raises(MoestreamError, match=rf"^here has no engine for hip; it has: {has}$") as caught:
        choose(entries, backend="hip")
    assert caught.value.hint == "moestream build --backend hip"


# ---------------------------------------------------------------- where a release is


def test_where_the_release_is(tmp_path):
    environment = {RELEASES_VARIABLE: "https://example.org/bins/"}
    assert resolve_origin(None, None, environment).url == f"https://example.org/bins/v{__version__}"
    assert resolve_origin("v9.1-rc2", None, environment).url == "https://example.org/bins/v9.1-rc2"
    assert resolve_origin(None, "http://localhost:80/x/", {}).url == "http://localhost:80/x"
    assert resolve_origin(None, str(tmp_path), environment).folder == tmp_path


@pytest.mark.parametrize(
    ("release", "given", "variable", "message"),
    [
        (None, None, "", "no address of prebuilt engines is known"),
        ("v1", "/tmp", "", "--release and --from exclude each other"),
        ("../x", None, "https://example.org", "--release '../x' is no tag"),
        ("", None, "https://example.org", "--release '' is no tag"),
        (None, "/nonexistent/x", "", "--from /nonexistent/x: no such folder"),
        (None, "", "", "--from : no such folder"),
        (None, "ftp://example.org", "", "--from ftp://example.org is no address of a web server"),
        (None, "https://", "", "--from https:// is no address of a web server"),
        (None, None, "example.org/bins", "MOESTREAM_BINS_URL example.org/bins is no address of a web server"),
        (None, "http://a:b:c/", "", "--from http://a:b:c/: Invalid port"),
    ],
)
def test_a_place_that_is_none(release, given, variable, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MoestreamError) as caught:
        resolve_origin(release, given, {RELEASES_VARIABLE: variable})
    assert caught.value.message.startswith(message) and caught.value.hint


def test_a_manifest_without_end_is_cut_off(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(manifest, "MAX_BYTES", 100)
    (tmp_path / "moestream-engines.json").write_text(json.dumps(manifest_of(listed(ENGINE, b"x"))))
    with pytest.raises(MoestreamError, match="is no manifest: it is larger than 100 bytes"):
        bins.install(resolve_origin(None, str(tmp_path), {}))

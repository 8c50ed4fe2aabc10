from __future__ import annotations

import json
from pathlib import Path

import pytest

from moestream import paths
from moestream.errors import MoestreamError
from moestream.upstream import engines
from moestream.upstream.engines import Engine, engine_id, in_use, installed, read_engine, write_description
from moestream.upstream.pin import load_pin


@pytest.fixture
def install():
    """Puts an engine with one program into the data folder."""

    def put(**changes) -> Engine:
        fields = {
            "source": load_pin().version,
            "sources_sha256": engines.sources_hash(),
            "backend": "cpu",
            "cpu": engines.cpu_kind(),
            "built_at": "2026-01-01T00:00:00+00:00",
            **changes,
        }
        name = engine_id(fields["source"], fields["sources_sha256"], fields["backend"], fields["cpu"])
        engine = Engine(
            id=name,
            path=paths.engines_dir() / name,
            targets=("llama-server",),
            tools=("llama-server",),
            cmake_args=("-DX=1",),
            extra_cmake_args=(),
            web_ui=False,
            test_series_sha256="",
            **fields,
        )
        engine.bin_dir.mkdir(parents=True)
        (engine.bin_dir / "llama-server").write_text("")
        write_description(engine, engine.path)
        return engine

    return put


def test_written_and_read_back(install):
    engine = install()
    assert read_engine(engine.path) == engine
    assert json.loads((engine.path / "engine.json").read_text())["schema"] == "moestream/engine/1"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"schema": "moestream/engine/2"}', '{"schema": "moestream/engine/1"}', "{", "[" * 100000]
)
def test_a_folder_that_is_no_engine_is_passed_over(install, text):
    engine = install()
    (paths.engines_dir() / "other").mkdir()
    (paths.engines_dir() / "other" / "engine.json").write_text(text)
    assert installed() == [engine]


@pytest.mark.parametrize("wrong", [{"backend": 7}, {"cuda_archs": [1]}, {"targets": 3}])
def test_a_description_with_another_kind_of_value_is_passed_over(install, wrong):
    engine = install()
    file = engine.path / "engine.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **wrong}))
    assert installed() == []


def test_none_built():
    with pytest.raises(MoestreamError, match=r"^no engine is built$") as caught:
        in_use()
    assert caught.value.hint == "moestream build"


@pytest.mark.parametrize("stale", [{"source": "0.0.1"}, {"sources_sha256": "0" * 64}, {"cpu": "x86_64-000000"}])
def test_an_engine_of_another_pin_patch_or_processor_is_not_used(install, stale):
    install(**stale)
    with pytest.raises(MoestreamError, match="matches this version of moestream and this processor"):
        in_use()
    current = install()
    assert in_use() == current


def test_a_gpu_comes_before_the_cpu_and_the_pin_before_other_sources(install):
    cpu, other = install(), install(source="src.0123456789", built_at="2026-02-02T00:00:00+00:00")
    assert in_use() == cpu
    cuda = install(backend="cuda")
    assert in_use() == cuda
    assert in_use("cpu") == cpu
    assert installed() == [cuda, cpu, other]


def test_one_for_this_processor_comes_before_a_portable_one(install):
    portable = install(cpu=engines.portable_cpu(), portable=True, built_at="2026-03-03T00:00:00+00:00")
    assert in_use() == portable
    native = install()
    assert in_use() == native and installed() == [native, portable]


def test_a_portable_engine_of_another_architecture_is_not_used(install):
    install(cpu="riscv64-portable", portable=True)
    with pytest.raises(MoestreamError, match="matches this version of moestream and this processor"):
        in_use()


def test_a_description_from_before_there_were_portable_engines(install):
    engine = install()
    file = engine.path / "engine.json"
    values = json.loads(file.read_text())
    del values["portable"]
    file.write_text(json.dumps(values))
    assert in_use() == engine


def test_where_engines_are_published_downloading_is_named_too(monkeypatch):
    monkeypatch.setenv("MOESTREAM_BINS_URL", "https://example.org")
    with pytest.raises(MoestreamError) as caught:
        in_use("cuda")
    assert caught.value.hint == "moestream build --backend cuda, or moestream download-bins --backend cuda"


def test_the_newest_of_other_sources(install):
    install(source="src.0000000000", built_at="2026-01-01T00:00:00+00:00")
    newer = install(source="src.1111111111", built_at="2026-01-02T00:00:00+00:00")
    assert in_use() == newer


def test_a_backend_that_is_not_built_or_not_known(install):
    install()
    with pytest.raises(MoestreamError, match="no engine for cuda is built") as caught:
        in_use("cuda")
    assert caught.value.hint == "moestream build --backend cuda"
    with pytest.raises(MoestreamError, match="unknown backend 'opencl'"):
        in_use("opencl")


def test_tools(install):
    engine = install()
    assert engine.tool("llama-server") == engine.path / "bin" / "llama-server"
    with pytest.raises(MoestreamError, match="has no llama-bench") as caught:
        engine.tool("llama-bench")
    assert caught.value.hint == "moestream build --backend cpu --target llama-bench"


def test_every_property_is_part_of_the_id():
    base = ("1.0", "a" * 64, "cpu", "x86_64-abc", ())
    changed = [("1.1", *base[1:]), (base[0], "b" * 64, *base[2:]), (*base[:2], "cuda", *base[3:]), (*base[:3], "arm-abc", ())]
    ids = {engine_id(*values) for values in [base, *changed, (*base[:4], ("-DA=1",)), (*base[:4], ("-DA=2",))]}
    assert len(ids) == 7


def test_the_sources_hash_follows_patches_and_engine_files(tmp_path, monkeypatch):
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches" / "series").write_text("a.patch\n")
    (tmp_path / "patches" / "a.patch").write_text("1")
    (tmp_path / "engine" / "cuda").mkdir(parents=True)
    (tmp_path / "engine" / "a.cpp").write_text("1")
    monkeypatch.setattr(paths, "shipped_root", lambda: tmp_path)
    seen = [engines.sources_hash()]
    for file, text in (("patches/a.patch", "2"), ("engine/a.cpp", "2"), ("engine/cuda/b.cu", "1")):
        (tmp_path / file).write_text(text)
        seen.append(engines.sources_hash())
    assert len(set(seen)) == 4
    (tmp_path / "engine" / "README.md").write_text("prose")
    (tmp_path / "patches" / "series").write_text("# comment\na.patch\n")
    assert engines.sources_hash() == seen[-1]


def test_cpu_kind_is_the_same_each_time_and_names_the_machine(monkeypatch):
    first = engines.cpu_kind()
    assert first == engines.cpu_kind()
    monkeypatch.setattr(Path, "read_text", lambda *args, **kwargs: "flags\t\t: fpu avx512f other\n")
    assert engines.cpu_kind() != first
    assert engines.cpu_kind().rpartition("-")[0] == first.rpartition("-")[0]

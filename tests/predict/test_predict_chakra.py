"""A predicted step in Chakra's schema, read back by protobuf itself with a descriptor of the published fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from xsp.cli import main
from xsp.errors import OutputError, UsageError
from xsp.predict import chakra, collectives, prediction
from xsp.predict.collectives import Algorithm
from xsp.predict.training import Job, Layer, Straggler, Work

pytest.importorskip("google.protobuf")

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

FIELDS = {
    "AttributeProto": {"name": (1, "STRING"), "double_val": (3, "DOUBLE"), "int64_val": (9, "INT64"),
                       "bool_val": (27, "BOOL"), "string_val": (29, "STRING")},
    "GlobalMetadata": {"version": (1, "STRING"), "attr": (2, "*AttributeProto")},
    "Node": {"id": (1, "UINT64"), "name": (2, "STRING"), "type": (3, "INT32"), "ctrl_deps": (4, "*UINT64"),
             "data_deps": (5, "*UINT64"), "start_time_micros": (6, "UINT64"), "duration_micros": (7, "UINT64"),
             "attr": (10, "*AttributeProto")},
}  # fmt: skip
"""Numbers and types of the published schema."""

MIB = 1 << 20
WORK = Work(
    (Layer("one", 0.010, 0.020, (3 * MIB,)), Layer("two", 0.005, 0.010, (MIB, 30 * MIB))), update=0.002, other=0.001
)
LINK = collectives.link("10us,10GB/s")


def messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="et_of_tests.proto", package="tests", syntax="proto3")
    for name, fields in FIELDS.items():
        made = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            one = made.field.add(name=field, number=number)
            one.label = one.LABEL_REPEATED if kind.startswith("*") else one.LABEL_OPTIONAL
            kind = kind.removeprefix("*")
            one.type = one.TYPE_MESSAGE if kind in FIELDS else getattr(one, f"TYPE_{kind}")
            if kind in FIELDS:
                one.type_name = f".tests.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tests.{name}")) for name in FIELDS}


def read(content: bytes) -> tuple[Any, list[Any]]:
    """Return metadata and nodes."""
    from google.protobuf.internal.decoder import _DecodeVarint32

    kinds, found, place = messages(), [], 0
    while place < len(content):
        size, place = _DecodeVarint32(content, place)
        found.append(kinds["Node" if found else "GlobalMetadata"].FromString(content[place : place + size]))
        place += size
    return found[0], found[1:]


def attributes(message: Any) -> dict[str, Any]:
    return {each.name: getattr(each, each.ListFields()[-1][0].name) if len(each.ListFields()) > 1 else 0
            for each in message.attr}  # fmt: skip


def test_each_rank_has_its_tasks_with_their_times_sizes_and_order(tmp_path: Path) -> None:
    found = prediction.predict(WORK, Job(4, LINK, Algorithm.RING, straggler=Straggler(1.5)), per_layer=True)
    assert chakra.write(found, [31 * MIB, 3 * MIB], tmp_path) == 4
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"rank.{rank}.et" for rank in range(4)]
    metadata, nodes = read((tmp_path / "rank.0.et").read_bytes())
    assert metadata.version == "0.0.4"
    assert attributes(metadata)["ranks"] == 4
    assert attributes(metadata)["predicted_step_s"] == pytest.approx(found.step)
    named = {each.name: each for each in nodes}
    assert [each.id for each in nodes] == list(range(len(nodes)))
    assert all(need < each.id for each in nodes for need in each.data_deps)
    assert [each.type for each in nodes if each.name.startswith("all-reduce")] == [7, 7]
    sent = [attributes(each) for each in nodes if each.type == 7]
    assert [each["comm_size"] for each in sent] == [31 * MIB, 3 * MIB]
    assert {each["comm_type"] for each in sent} == {0}
    assert named["forward one"].duration_micros == 10_000
    assert {nodes[each].name for each in named["all-reduce 0"].data_deps} >= {"backward two"}
    assert {nodes[each].name for each in named["update"].data_deps} >= {"backward one", "all-reduce 1"}
    _, slow = read((tmp_path / "rank.3.et").read_bytes())
    assert next(each for each in slow if each.name == "forward one").duration_micros == 15_000


def test_a_simulation_of_the_file_takes_as_long_as_the_step() -> None:
    """In the order of what each node waits for, computing in a row and collectives in a row."""
    found = prediction.predict(WORK, Job(8, LINK, Algorithm.RING), per_layer=True)
    _, nodes = read(chakra.content(found, [31 * MIB, 3 * MIB], 0))
    ends: dict[int, float] = {}
    free = {4: 0.0, 7: 0.0}
    for each in nodes:
        start = max([free[each.type], *(ends[need] for need in each.data_deps)])
        ends[each.id] = free[each.type] = start + attributes(each)["duration_s"]
    assert max(ends.values()) == pytest.approx(found.step)


def test_sharded_steps_gather_and_scatter() -> None:
    found = prediction.predict(WORK, Job(8, LINK, sharded=True), per_layer=True)
    _, nodes = read(chakra.content(found, [31 * MIB, 3 * MIB], 0))
    assert {attributes(each)["comm_type"] for each in nodes if each.type == 7} == {2, 7}


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = prediction.predict(WORK, Job(2, LINK), per_layer=True)
    with pytest.raises(OutputError, match="cannot be written"):
        chakra.write(found, [31 * MIB, 3 * MIB], tmp_path / "file")
    with pytest.raises(UsageError, match="too many"):
        chakra.write(prediction.predict(WORK, Job(5000, LINK), per_layer=True), [31 * MIB, 3 * MIB], tmp_path)


def test_the_public_reader_takes_it(tmp_path: Path) -> None:
    schema = pytest.importorskip("chakra.schema.protobuf.et_def_pb2", reason="chakra of MLCommons is not installed")
    protolib = pytest.importorskip("chakra.src.third_party.utils.protolib")
    found = prediction.predict(WORK, Job(2, LINK), per_layer=True)
    chakra.write(found, [31 * MIB, 3 * MIB], tmp_path)
    with protolib.openFileRd(str(tmp_path / "rank.0.et")) as file:
        metadata, node = schema.GlobalMetadata(), schema.Node()
        assert protolib.decodeMessage(file, metadata)
        count = 0
        while protolib.decodeMessage(file, node):
            count += 1
    assert metadata.version == "0.0.4"
    assert count == len(read((tmp_path / "rank.0.et").read_bytes())[1])


def test_who_gives_such_a_file_to_be_read_is_told_what_it_is_and_what_to_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chakra.write(prediction.predict(WORK, Job(2, LINK), per_layer=True), [31 * MIB, 3 * MIB], tmp_path / "step2")
    given = str(tmp_path / "step2" / "rank.0.et")
    for typed in (["graph", given], ["graph", str(tmp_path / "step2")], ["analyze", given, "A2"]):
        assert main(typed) == 2
        said = capsys.readouterr().err
        assert f"{given}: an execution trace of tasks for simulators" in said
        assert "give the run that it was made from" in said


def test_a_folder_with_more_ranks_of_another_step_is_refused(tmp_path: Path) -> None:
    sizes = [31 * MIB, 3 * MIB]
    chakra.write(prediction.predict(WORK, Job(4, LINK), per_layer=True), sizes, tmp_path)
    assert chakra.write(prediction.predict(WORK, Job(4, LINK), per_layer=True), sizes, tmp_path) == 4
    with pytest.raises(OutputError, match=r"has rank\.3\.et of a step on more ranks: name another folder"):
        chakra.write(prediction.predict(WORK, Job(2, LINK), per_layer=True), sizes, tmp_path)


def test_a_bucket_that_is_compressed_has_the_bytes_that_travel(tmp_path: Path) -> None:
    found = prediction.predict(WORK, Job(2, LINK, compress=2.0), per_layer=True)
    chakra.write(found, [31 * MIB, 3 * MIB], tmp_path)
    _, nodes = read((tmp_path / "rank.0.et").read_bytes())
    told = [attributes(each)["comm_size"] for each in nodes if each.name.startswith("all-reduce")]
    assert sorted(told) == [3 * MIB // 2, 31 * MIB // 2]

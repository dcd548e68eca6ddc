"""GGUF files as gguf-py writes them: metadata, tensors of every block format, and refusals."""

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFEndian, GGUFWriter
from numpy.typing import NDArray

from dgemma.errors import CheckpointError
from dgemma.quant.gguf import FORMATS, TYPE_NAMES
from dgemma.weights.gguf import GGUFFile

NUM_ROWS, BLOCKS_PER_ROW = 3, 2
# Byte offsets of the float16 scales of a block, which must be finite.
SCALES = {
    "F16": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


def write(
    path: Path,
    tensors: dict[str, tuple[NDArray[np.generic], GGMLQuantizationType | None]],
    fill: Callable[[GGUFWriter], None] = lambda writer: None,
    endian: GGUFEndian = GGUFEndian.LITTLE,
) -> Path:
    """Write a file by gguf-py: arrays by name, with a type where they are packed bytes."""
    writer = GGUFWriter(path, "test", endianess=endian)
    fill(writer)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def packed_rows(type_id: int) -> NDArray[np.uint8]:
    """Draw rows of random blocks whose scales are finite numbers."""
    block = FORMATS[type_id]
    rng = np.random.default_rng(type_id)
    shape = (NUM_ROWS * BLOCKS_PER_ROW, block.num_bytes)
    blocks = rng.integers(0, 256, shape, dtype=np.uint8)
    for offset in SCALES.get(block.name, ()):
        blocks[:, offset + 1] &= 0x3F
    if block.name == "NVFP4":
        blocks[:, :4] &= 0x7F  # scales are unsigned
    if block.name in ("F32", "BF16"):
        blocks[:, -1] &= 0x3F
    return blocks.reshape(NUM_ROWS, -1)


def plain(path: Path) -> Path:
    """Write a small file with one float32 matrix."""
    return write(path, {"w": (np.arange(12, dtype=np.float32).reshape(3, 4), None)})


@pytest.mark.parametrize("type_id", FORMATS, ids=lambda type_id: FORMATS[type_id].name)
def test_blocks_equal_gguf_py_bit_for_bit(tmp_path: Path, type_id: int) -> None:
    kind, rows = GGMLQuantizationType(type_id), packed_rows(type_id)
    # gguf-py takes plain types as arrays of their own, and packed ones as bytes.
    plain_types = {"F32": np.float32, "F16": np.float16}
    dtype = plain_types.get(kind.name)
    array = rows if dtype is None else rows.view(dtype)
    file = GGUFFile(write(tmp_path / "a.gguf", {"w": (array, kind)}))
    expected = np.asarray(gguf.dequantize(rows if dtype is None else array, kind), np.float32)
    values = file.dequantize("w")
    assert values.dtype == torch.float32
    assert tuple(values.shape) == (NUM_ROWS, BLOCKS_PER_ROW * FORMATS[type_id].num_weights)
    assert np.array_equal(values.numpy().view(np.int32), expected.view(np.int32))
    assert np.isfinite(expected).all() and len(np.unique(expected)) > 2


def test_types_and_block_sizes_are_the_formats_own() -> None:
    assert {int(kind): kind.name for kind in GGMLQuantizationType} == TYPE_NAMES
    for type_id, block in FORMATS.items():
        sizes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
        assert sizes == (block.num_weights, block.num_bytes)


def test_quantized_weights_come_back(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    names = ["Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "MXFP4"]
    tensors = {}
    for name in names:
        kind = GGMLQuantizationType[name]
        tensors[name] = (gguf.quantize(weights, kind), kind)
    file = GGUFFile(write(tmp_path / "a.gguf", tensors))
    errors = []
    for name in names:
        error = file.dequantize(name).numpy() - weights
        errors.append(float(np.linalg.norm(error) / np.linalg.norm(weights)))
    assert errors == sorted(errors) and errors[0] < 0.01 and errors[-1] < 0.2


def test_metadata_of_every_type(tmp_path: Path) -> None:
    def fill(writer: GGUFWriter) -> None:
        writer.add_uint8("a.u8", 200)
        writer.add_int8("a.i8", -3)
        writer.add_uint16("a.u16", 60000)
        writer.add_int16("a.i16", -300)
        writer.add_uint32("a.u32", 1 << 31)
        writer.add_int32("a.i32", -70000)
        writer.add_uint64("a.u64", 1 << 63)
        writer.add_int64("a.i64", -(1 << 40))
        writer.add_float32("a.f32", 0.5)
        writer.add_float64("a.f64", 0.1)
        writer.add_bool("a.bool", True)
        writer.add_string("a.string", "größer")
        writer.add_array("a.ints", [8, 8, 2])
        writer.add_array("a.floats", [1.5, -2.0])
        writer.add_array("a.strings", ["", "▁a", "<0x0A>"])

    file = GGUFFile(write(tmp_path / "a.gguf", {}, fill))
    metadata = {key: value for key, value in file.metadata.items() if key.startswith("a.")}
    assert metadata == {
        "a.u8": 200,
        "a.i8": -3,
        "a.u16": 60000,
        "a.i16": -300,
        "a.u32": 1 << 31,
        "a.i32": -70000,
        "a.u64": 1 << 63,
        "a.i64": -(1 << 40),
        "a.f32": 0.5,
        "a.f64": 0.1,
        "a.bool": True,
        "a.string": "größer",
        "a.ints": [8, 8, 2],
        "a.floats": [1.5, -2.0],
        "a.strings": ["", "▁a", "<0x0A>"],
    }
    assert file.version == 3 and file.value("general.architecture", str) == "test"
    assert file.value("a.u8", int) == 200 and file.value("a.u8", float) == 200.0
    with pytest.raises(CheckpointError, match=r"a\.f32 should be a int; there is a float"):
        file.value("a.f32", int)
    with pytest.raises(CheckpointError, match=r"a\.bool should be a int"):
        file.value("a.bool", int)
    with pytest.raises(CheckpointError, match="none should be a str; there is no such key"):
        file.value("none", str)


def test_dimensions_alignment_and_views(tmp_path: Path) -> None:
    first = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    second = np.arange(5, dtype=np.float16)

    def fill(writer: GGUFWriter) -> None:
        writer.add_custom_alignment(128)

    path = write(tmp_path / "a.gguf", {"first": (first, None), "second": (second, None)}, fill)
    file = GGUFFile(path)
    assert file.tensors["first"].shape == (2, 3, 4)
    assert all(tensor.start % 128 == 0 for tensor in file.tensors.values())
    assert np.array_equal(file.dequantize("first").numpy(), first)
    assert np.array_equal(file.dequantize("second").numpy(), second.astype(np.float32))
    stored = path.read_bytes()
    view = file.packed("second")
    assert bytes(view.numpy()) == second.tobytes()
    view.zero_()  # a write reaches neither the file nor its other readers
    assert path.read_bytes() == stored
    with pytest.raises(CheckpointError, match="has no tensor third; it has 2"):
        file.dequantize("third")


def damage(path: Path, offset: int, data: bytes) -> Path:
    stored = bytearray(path.read_bytes())
    stored[offset : offset + len(data)] = data
    path.write_bytes(stored)
    return path


def entry_offset(path: Path, name: str) -> int:
    """Return the byte after a tensor's name in the table: its number of dimensions."""
    return path.read_bytes().index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"GGML", "not a GGUF file"),
        (4, struct.pack("<I", 1), "GGUF version 1; versions 2 and 3"),
        (4, struct.pack("<I", 4), "GGUF version 4"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 1 << 60), "1152921504606846976 entries are announced at byte 8"),
        (16, struct.pack("<Q", 1 << 60), "entries are announced at byte 16"),
        (24, struct.pack("<Q", 1 << 60), "entries are announced at byte 24"),
        (32, b"\xff\xfe", "not UTF-8"),
    ],
)
def test_damaged_headers_are_refused(
    tmp_path: Path, offset: int, data: bytes, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(damage(plain(tmp_path / "a.gguf"), offset, data))


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    array = np.zeros((2, 2), np.float32)
    path = write(tmp_path / "a.gguf", {"w": (array, None)}, endian=GGUFEndian.BIG)
    with pytest.raises(CheckpointError, match="big-endian GGUF file; convert it"):
        GGUFFile(path)


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    whole = plain(tmp_path / "a.gguf").read_bytes()
    end = len(whole.rstrip(b"\0"))
    path = tmp_path / "cut.gguf"
    for length in range(end):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut short|not a GGUF|cannot map"):
            GGUFFile(path)


@pytest.mark.parametrize(
    ("at", "data", "message"),
    [
        (0, struct.pack("<I", 5), "w has 5 dimensions; at most 4"),
        (4, struct.pack("<Q", 0), r"w has dimensions \[0, 3\]"),
        (4, struct.pack("<Q", 1 << 40), "w should end at byte"),
        (20, struct.pack("<I", 77), "w is stored as the unknown type 77; this build reads F32"),
        (20, struct.pack("<I", 17), "w is stored as IQ2_XS; this build reads F32, F16"),
        (20, struct.pack("<I", 26), "w is stored as I32"),
        (20, struct.pack("<I", 8), r"w has dimensions \[4, 3\]; in Q8_0 the first is a multiple"),
        (24, struct.pack("<Q", 4), "misaligned: its offset 4 is not a multiple of 32"),
        (24, struct.pack("<Q", 1 << 50), "is cut short: w should end"),
    ],
)
def test_damaged_tables_are_refused(tmp_path: Path, at: int, data: bytes, message: str) -> None:
    path = plain(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(damage(path, entry_offset(path, "w") + at, data))


def test_tensors_may_neither_share_a_name_nor_bytes(tmp_path: Path) -> None:
    array = np.zeros((4, 8), np.float32)
    path = write(tmp_path / "a.gguf", {"one": (array, None), "two": (array, None)})
    second = entry_offset(path, "two")
    whole = path.read_bytes()
    with pytest.raises(CheckpointError, match="overlaps the tensor before it"):
        GGUFFile(damage(path, second + 24, struct.pack("<Q", 64)))
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match="has the tensor one twice"):
        GGUFFile(damage(path, second - 3, b"one"))


@pytest.mark.parametrize("alignment", [0, 24])
def test_alignments_that_cannot_be_are_refused(tmp_path: Path, alignment: int) -> None:
    path = write(
        tmp_path / "a.gguf",
        {"w": (np.zeros(4, np.float32), None)},
        lambda writer: writer.add_uint32("general.alignment", 64),
    )
    at = path.read_bytes().index(b"general.alignment") + len(b"general.alignment") + 4
    with pytest.raises(CheckpointError, match=f"alignment is {alignment}; it is a power of two"):
        GGUFFile(damage(path, at, struct.pack("<I", alignment)))


def test_values_of_unknown_types_are_refused(tmp_path: Path) -> None:
    def fill(writer: GGUFWriter) -> None:
        writer.add_array("numbers", [1, 2])

    path = write(tmp_path / "a.gguf", {}, fill)
    at = path.read_bytes().index(b"numbers") + len(b"numbers")
    whole = path.read_bytes()
    with pytest.raises(CheckpointError, match="numbers has value type 13"):
        GGUFFile(damage(path, at, struct.pack("<I", 13)))
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match="numbers is an array of value type 9"):
        GGUFFile(damage(path, at + 4, struct.pack("<I", 9)))


def test_names_must_fit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", {"w" * 64: (np.zeros(4, np.float32), None)})
    with pytest.raises(CheckpointError, match="a name of 64 bytes; at most 63"):
        GGUFFile(path)


def test_a_file_of_a_split_model_must_have_its_name(tmp_path: Path) -> None:
    def fill(writer: GGUFWriter) -> None:
        writer.add_uint16("split.no", 0)
        writer.add_uint16("split.count", 2)

    message = "one of 2 files of a split model, and such files are named"
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(write(tmp_path / "a.gguf", {}, fill))


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        GGUFFile(tmp_path / "none.gguf")
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot map"):
        GGUFFile(tmp_path / "empty.gguf")

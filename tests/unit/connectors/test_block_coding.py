"""Codecs and encryption of blocks at rest: what comes back, what it costs, and that hostile bytes are never a block."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.coding.block_cipher import BlockCipher, load_cipher
from connectors.coding.block_coding import BlockCoding, CodingOptions, decoded_in_full, fingerprints_at_rest
from connectors.coding.codec import Codec, RawCodec
from connectors.coding.coded_payload import CHECKSUM, PREFIX_BYTES, CodedPrefix, read_prefix
from connectors.coding.quantized import Fp8Codec, Int8Codec
from connectors.coding.zstd import ZstdCodec
from connectors.stored_block import CODED_VERSION, PLAIN_VERSION, BlockCheck, pack_block_header, read_block_header
from core.errors import ConfigError
from core.kv.layout import FLOAT_DTYPES, KVLayout
from deploy.cli import main

NAME, OTHER_NAME = b"n" * 16, b"m" * 16
SHAPES = [(1, 1, 1, 1), (1, 16, 1, 8), (2, 4, 2, 16), (3, 5, 1, 7), (30, 16, 3, 64)]
LAYOUT = KVLayout(2, 4, 2, 16, "bfloat16")


def layouts() -> list[KVLayout]:
    return [KVLayout(*shape, dtype) for shape in SHAPES for dtype in FLOAT_DTYPES]


def kv_like(layout: KVLayout, seed: int = 0) -> memoryview:
    """Normal numbers with a magnitude of its own per channel, as keys have."""
    rng = np.random.default_rng(seed)
    shape = (layout.num_layers, 2, layout.block_size, layout.num_kv_heads, layout.head_dim)
    values = (rng.standard_normal(shape) * np.exp(rng.standard_normal((*shape[:2], 1, *shape[3:])) * 2)).astype(np.float32)
    return memoryview(bytearray(as_bytes(values, layout.dtype)))


def as_bytes(values: np.ndarray, dtype: str) -> bytes:
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
    return values.astype("<f2" if dtype == "float16" else "<f4").tobytes()


def as_floats(payload: memoryview, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (np.frombuffer(payload, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.frombuffer(payload, "<f2" if dtype == "float16" else "<f4").astype(np.float64)


def cipher(seed: int = 1) -> BlockCipher:
    return BlockCipher(bytes([seed]) * 32)


def codings(layout: KVLayout) -> dict[str, BlockCoding]:
    codecs: dict[str, Codec | None] = {
        "none": None,
        "zstd": ZstdCodec(layout.dtype, 1),
        "int8": Int8Codec(layout),
        "fp8": Fp8Codec(layout),
    }
    return {
        f"{name}{'+key' if is_encrypted else ''}": BlockCoding(layout, codec, cipher() if is_encrypted else None)
        for name, codec in codecs.items()
        for is_encrypted in (False, True)
    }


def sealed(coding: BlockCoding, payload: memoryview, name: bytes = NAME) -> tuple[bytes, bytes]:
    found = coding.seal(name, payload)
    assert found is not None
    return found[0], bytes(found[1])


def opened(coding: BlockCoding, header: bytes, at_rest: bytes, name: bytes = NAME) -> tuple[BlockCheck, bytes]:
    target = bytearray(coding.block_bytes)
    check = coding.unseal(header, memoryview(at_rest), name, memoryview(target))
    return check, bytes(target)


@pytest.mark.parametrize("layout", layouts(), ids=str)
@pytest.mark.parametrize("name", ["none", "none+key", "zstd", "zstd+key"])
def test_lossless_block_comes_back_bit_for_bit(layout: KVLayout, name: str) -> None:
    coding = codings(layout)[name]
    for payload in (kv_like(layout), memoryview(os.urandom(layout.block_bytes)), memoryview(bytes(layout.block_bytes))):
        header, at_rest = sealed(coding, payload)
        assert len(at_rest) <= coding.max_bytes
        assert opened(coding, header, at_rest) == (BlockCheck.OK, bytes(payload))


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_layout_of_eight_bit_numbers_is_encrypted_as_it_is_and_refused_by_codecs(dtype: str, tmp_path: Path) -> None:
    layout = KVLayout(2, 4, 2, 16, dtype)
    payload = memoryview(os.urandom(layout.block_bytes))
    for coding in (CodingOptions().coding_for(layout), BlockCoding(layout, None, cipher())):
        assert opened(coding, *sealed(coding, payload)) == (BlockCheck.OK, bytes(payload))
    for codec in ("zstd", "int8", "fp8"):
        with pytest.raises(ConfigError, match=rf"options\.codec: got '{codec}'.*none where .*kv_cache_dtype is {dtype}"):
            CodingOptions(codec=codec).coding_for(layout)


@given(st.binary(min_size=LAYOUT.block_bytes, max_size=LAYOUT.block_bytes))
def test_lossless_block_of_any_bytes_comes_back(payload: bytes) -> None:
    for name in ("zstd", "zstd+key", "none+key"):
        coding = codings(LAYOUT)[name]
        assert opened(coding, *sealed(coding, memoryview(payload))) == (BlockCheck.OK, payload)


def test_zstd_block_that_does_not_shrink_stays_as_it_is() -> None:
    layout = KVLayout(4, 16, 2, 64, "float32")
    coding = codings(layout)["zstd"]
    random = memoryview(os.urandom(layout.block_bytes))
    header, at_rest = sealed(coding, random)
    assert at_rest == bytes(random) and (found := read_block_header(header)) is not None and found.version == PLAIN_VERSION
    _, encoded = sealed(coding, kv_like(layout))
    assert len(encoded) < layout.block_bytes


@pytest.mark.parametrize("layout", layouts(), ids=str)
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_lossy_block_comes_back_within_its_step(layout: KVLayout, name: str) -> None:
    coding = codings(layout)[name]
    payload = kv_like(layout)
    header, at_rest = sealed(coding, payload)
    assert len(at_rest) == coding.max_bytes  # of every block
    check, decoded = opened(coding, header, at_rest)
    assert check is BlockCheck.OK
    shape = (layout.num_layers * 2, layout.block_size, -1)
    before = as_floats(payload, layout.dtype).reshape(shape)
    after = as_floats(memoryview(decoded), layout.dtype).reshape(shape)
    greatest = np.abs(before).max(axis=1, keepdims=True)
    # Half a step of the codes, scales that are up to 1/128 too large, and the result's own rounding.
    rounding = np.abs(before) * {"bfloat16": 2**-8, "float16": 2**-10, "float32": 2**-22}[layout.dtype] + 1e-7
    step = greatest / 127 if name == "int8" else np.maximum(np.abs(before) / 8, greatest / 448 * 2**-9)
    assert (np.abs(after - before) <= step / 2 * 1.01 + rounding).all()


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_lossy_block_of_extreme_numbers_is_in_range_or_not_stored(name: str, dtype: str) -> None:
    layout = KVLayout(1, 4, 1, 4, dtype)
    coding = codings(layout)[name]
    for number in (0.0, 1e-40, 6e-8, 1e-20, 60000.0, -3e38):
        if dtype == "float16" and abs(number) > 65504:
            continue
        payload = memoryview(as_bytes(np.full(32, number, dtype=np.float32), dtype))
        check, decoded = opened(coding, *sealed(coding, payload))
        after, before = as_floats(memoryview(decoded), dtype), as_floats(payload, dtype)
        assert check is BlockCheck.OK and np.isfinite(after).all()
        assert (np.abs(after - before) <= np.abs(before) * 0.07 + 1e-37).all()
    for number in (np.inf, np.nan):
        values = np.ones(32, dtype=np.float32)
        values[7] = number
        assert coding.seal(NAME, memoryview(as_bytes(values, dtype))) is None


def test_fp8_codes_are_those_of_e4m3() -> None:
    layout = KVLayout(1, 2, 1, 128, "float32")
    codec = Fp8Codec(layout)
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F] + [0, 0], dtype=np.uint8)

    def value(code: int) -> float:
        exponent, mantissa = code >> 3 & 0xF, code & 7
        magnitude = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        return -magnitude if code & 0x80 else magnitude

    values = np.array([value(int(code)) for code in codes], dtype=np.float32)
    assert codec._to_numbers(codes).tolist() == values.tolist()
    assert (codec._to_numbers(codec._to_codes(values)) == values).all()
    assert codec._to_numbers(codec._to_codes(np.array([448.0, 460.0, -464.0], np.float32))).tolist() == [448.0, 448.0, -448.0]


def test_lossy_and_encrypted_blocks_have_names_of_their_own() -> None:
    by_name = {name: coding.fingerprint for name, coding in codings(LAYOUT).items()}
    assert by_name["none"] == by_name["zstd"] == LAYOUT.fingerprint and by_name["none+key"] == by_name["zstd+key"]
    assert len(set(by_name.values())) == 6
    assert fingerprints_at_rest(LAYOUT).keys() == set(by_name.values())


def test_exact_reader_takes_exact_blocks_however_they_are_encoded_and_no_lossy_one() -> None:
    payload, forms = kv_like(LAYOUT), codings(LAYOUT)
    for reader in ("none", "zstd"):
        for writer in ("none", "zstd"):
            assert opened(forms[reader], *sealed(forms[writer], payload)) == (BlockCheck.OK, bytes(payload))
        for writer in ("int8", "fp8", "none+key", "zstd+key"):
            assert opened(forms[reader], *sealed(forms[writer], payload))[0] is BlockCheck.MISS
    _, at_rest = sealed(forms["int8"], payload)  # and when somebody forges the header
    forged = pack_block_header(LAYOUT.fingerprint, NAME, at_rest, CODED_VERSION)
    assert opened(forms["none"], forged, at_rest)[0] is not BlockCheck.OK
    assert opened(forms["zstd"], forged, at_rest)[0] is not BlockCheck.OK


def test_encrypting_reader_takes_nothing_that_is_not_authenticated() -> None:
    payload, forms = kv_like(LAYOUT), codings(LAYOUT)
    reader = forms["none+key"]
    plain = pack_block_header(reader.fingerprint, NAME, payload)
    assert opened(reader, plain, bytes(payload))[0] is BlockCheck.CORRUPT
    coded = sealed(forms["zstd"], payload)[1]
    assert opened(reader, pack_block_header(reader.fingerprint, NAME, coded, CODED_VERSION), coded)[0] is BlockCheck.CORRUPT


@pytest.mark.parametrize("name", ["none+key", "zstd+key", "int8+key", "fp8+key"])
def test_encrypted_block_shows_nothing_and_never_looks_the_same(name: str) -> None:
    coding, payload = codings(LAYOUT)[name], kv_like(LAYOUT)
    first, second = sealed(coding, payload)[1], sealed(coding, payload)[1]
    assert first[PREFIX_BYTES:] != second[PREFIX_BYTES:]
    encoded = {bytes(payload)[start : start + 16] for start in range(LAYOUT.block_bytes - 16)}
    assert not any(first[start : start + 16] in encoded for start in range(len(first) - 16))


@pytest.mark.parametrize("name", ["none+key", "zstd+key", "int8+key"])
def test_encrypted_block_under_another_key_is_a_miss_that_says_so(name: str) -> None:
    payload = kv_like(LAYOUT)
    header, at_rest = sealed(codings(LAYOUT)[name], payload)
    other = BlockCoding(LAYOUT, {"n": None, "z": ZstdCodec("bfloat16", 1), "i": Int8Codec(LAYOUT)}[name[0]], cipher(2))
    assert opened(other, header, at_rest)[0] is BlockCheck.UNREADABLE
    assert cipher(1).key_id.hex() in other.complaint and cipher(2).key_id.hex() in other.complaint


def test_encrypted_blocks_that_were_swapped_are_corrupt_even_with_forged_headers() -> None:
    coding = codings(LAYOUT)["none+key"]
    header, at_rest = sealed(coding, kv_like(LAYOUT))
    assert opened(coding, header, at_rest, OTHER_NAME)[0] is BlockCheck.MISS
    forged = pack_block_header(coding.fingerprint, OTHER_NAME, at_rest, CODED_VERSION)
    assert opened(coding, forged, at_rest, OTHER_NAME)[0] is BlockCheck.CORRUPT


@settings(deadline=None)
@given(data=st.data())
def test_encrypted_block_with_any_bit_changed_and_the_header_forged_is_no_block(data: st.DataObject) -> None:
    coding = codings(LAYOUT)[data.draw(st.sampled_from(["none+key", "zstd+key", "int8+key"]))]
    at_rest = bytearray(sealed(coding, kv_like(LAYOUT))[1])
    bit = data.draw(st.integers(0, len(at_rest) * 8 - 1))
    at_rest[bit // 8] ^= 1 << bit % 8
    forged = pack_block_header(coding.fingerprint, NAME, at_rest, CODED_VERSION)
    assert opened(coding, forged, bytes(at_rest))[0] is not BlockCheck.OK


@settings(deadline=None)
@given(data=st.data())
def test_hostile_payloads_with_right_checksums_are_never_a_wrong_exact_block(data: st.DataObject) -> None:
    """Whoever can write to a store can make headers; nothing that they write may do worse than be a block of numbers."""
    name = data.draw(st.sampled_from(["none", "zstd", "int8", "fp8", "none+key"]))
    coding = codings(LAYOUT)[name]
    start = bytearray(sealed(codings(LAYOUT)["zstd" if name == "none" else name], kv_like(LAYOUT))[1])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(start) - 1))
        start[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=8))
        start = start or bytearray(1)
    header = pack_block_header(coding.fingerprint, NAME, start, CODED_VERSION)
    check, decoded = opened(coding, header, bytes(start))
    if check is BlockCheck.OK and name == "none":
        assert decoded == bytes(kv_like(LAYOUT))


def test_decompression_bombs_are_refused_before_they_are_decoded() -> None:
    coding = codings(LAYOUT)["zstd"]

    def outcome(frame: bytes, raw_bytes: int = LAYOUT.block_bytes) -> BlockCheck:
        encoded = struct.pack("<BI", 2, len(frame)) + frame + bytes(LAYOUT.block_bytes // 2)
        at_rest = CodedPrefix(ZstdCodec.number, raw_bytes).pack() + CHECKSUM.pack(0) + encoded
        return opened(coding, pack_block_header(LAYOUT.fingerprint, NAME, at_rest, CODED_VERSION), at_rest)[0]

    bomb = zstandard.ZstdCompressor().compress(bytes(2**30))
    assert outcome(bomb) is BlockCheck.CORRUPT and outcome(bomb, 2**30) is BlockCheck.CORRUPT
    # A frame that does not say how long it is, and one that lies.
    compressor = zstandard.ZstdCompressor(write_content_size=False)
    assert outcome(compressor.compress(bytes(2**24))) is BlockCheck.CORRUPT
    num_high = LAYOUT.block_bytes // 2
    lying = bytearray(zstandard.ZstdCompressor().compress(bytes(num_high + 1000)))
    place = lying.find(struct.pack("<H", num_high + 1000 - 256))
    lying[place : place + 2] = struct.pack("<H", num_high - 256)
    assert place > 0 and outcome(bytes(lying)) is BlockCheck.CORRUPT


def test_prefix_that_no_writer_writes_is_none() -> None:
    good = CodedPrefix(1, 1024).pack() + bytes(8)
    assert read_prefix(good) == CodedPrefix(1, 1024)
    assert read_prefix(good[:-1]) is None
    assert read_prefix(good[:2] + b"\1" + good[3:]) is None  # a byte that is zero
    assert read_prefix(bytes([1, 9]) + good[2:]) is None  # an unknown cipher
    assert read_prefix(CodedPrefix(1, 0).pack() + bytes(8)) is None
    assert read_prefix(CodedPrefix(1, 2**40).pack() + bytes(8)) is None


def test_decoded_in_full_gives_the_plain_form_of_exact_blocks_alone() -> None:
    payload, forms = kv_like(LAYOUT), codings(LAYOUT)
    plain = decoded_in_full(*sealed(forms["zstd"], payload))
    assert plain is not None and plain[1] == bytes(payload)
    assert opened(forms["none"], *plain) == (BlockCheck.OK, bytes(payload))
    for name in ("none", "int8", "zstd+key"):
        assert decoded_in_full(*sealed(forms[name], payload)) is None
    header, at_rest = sealed(forms["zstd"], payload)
    assert decoded_in_full(header, at_rest[:-1]) is None


def test_raw_codec_refuses_another_length() -> None:
    assert not RawCodec(4).decode(memoryview(b"abc"), memoryview(bytearray(4)))


def test_store_key_is_made_once_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "key"
    assert main(["keys", "store", str(path)]) == 0
    assert path.stat().st_mode & 0o777 == 0o600 and len(path.read_bytes()) == 32
    assert main(["keys", "store", str(path)]) == 2
    assert "FILE: got" in capsys.readouterr().err
    load_cipher(str(path))
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_cipher(str(path))
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="a file of 32 bytes"):
        load_cipher(str(path))
    with pytest.raises(ConfigError, match=r"encryption_key_file: got .*none'; allowed: a readable file"):
        load_cipher(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("options", "codecs", "expected"),
    [
        (CodingOptions("gzip"), ("none", "zstd"), "connector.options.codec: got 'gzip'; allowed: one of none, zstd"),
        (CodingOptions("zstd"), ("none", "int8", "fp8"), "slots are of equal size"),
        (CodingOptions("zstd", codec_level=0), ("none", "zstd"), "connector.options.codec_level: got 0; allowed: 1 "),
    ],
)
def test_coding_options_that_are_not_allowed_say_so(options: CodingOptions, codecs: tuple[str, ...], expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        options.check(codecs)
    assert expected in str(raised.value)

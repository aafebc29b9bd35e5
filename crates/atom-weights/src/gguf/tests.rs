use super::value::Kind;
use super::write::GgufWriter;
use super::*;
use crate::DType;

fn read(writer: &GgufWriter) -> Result<Gguf, WeightsError> {
    Gguf::from_bytes(writer.finish(), Path::new("test.gguf"))
}

fn refused(writer: &GgufWriter) -> String {
    read(writer).unwrap_err().to_string()
}

#[test]
fn every_type_of_value_comes_back() {
    let mut writer = GgufWriter::new();
    writer
        .string("s", "Grüße")
        .u32("u", 7)
        .f32("f", 0.5)
        .bool("yes", true)
        .bool("no", false)
        .strings("tokens", &["a", "", "Ġb", "🦀"])
        .strings::<&str>("none", &[])
        .i32s("types", &[1, -3, i32::MAX])
        .f32s("scores", &[-1.0, 0.25])
        .value("i64", Kind::I64 as u32, &9_i64.to_le_bytes())
        .value("f64", Kind::F64 as u32, &2.5_f64.to_le_bytes())
        .value("u16", Kind::U16 as u32, &[1, 2]);
    let gguf = read(&writer).unwrap();
    assert_eq!(gguf.version(), 3);
    assert_eq!(gguf.string("s").unwrap(), Some("Grüße"));
    assert_eq!(gguf.u32("u").unwrap(), Some(7));
    assert_eq!(gguf.u32("i64").unwrap(), Some(9));
    assert_eq!(gguf.u64("u16").unwrap(), Some(0x201));
    assert_eq!(gguf.f32("f").unwrap(), Some(0.5));
    assert_eq!(gguf.f32("f64").unwrap(), Some(2.5));
    assert_eq!((gguf.bool("yes").unwrap(), gguf.bool("no").unwrap()), (Some(true), Some(false)));
    assert_eq!(gguf.strings("tokens").unwrap().unwrap(), ["a", "", "Ġb", "🦀"]);
    assert_eq!(gguf.strings("none").unwrap().unwrap(), [""; 0]);
    assert_eq!(gguf.i32s("types").unwrap().unwrap(), [1, -3, i32::MAX]);
    assert_eq!(gguf.f32s("scores").unwrap().unwrap(), [-1.0, 0.25]);
    assert_eq!(gguf.keys().count(), 12);
}

#[test]
fn absence_is_none_and_another_type_is_an_error_that_names_both() {
    let mut writer = GgufWriter::new();
    writer
        .string("name", "x")
        .u32("count", 1)
        .value("huge", Kind::U64 as u32, &u64::MAX.to_le_bytes())
        .value("negative", Kind::I32 as u32, &(-1_i32).to_le_bytes())
        .strings("tokens", &["a", "b"]);
    let gguf = read(&writer).unwrap();
    assert!(gguf.u32("absent").unwrap().is_none() && gguf.strings("absent").unwrap().is_none());
    let check = |error: WeightsError, parts: &[&str]| {
        let error = error.to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    };
    check(gguf.u32("name").unwrap_err(), &["test.gguf: name", "a string of 1 bytes", "32 bits"]);
    check(gguf.u32("huge").unwrap_err(), &["18446744073709551615 (u64)"]);
    check(gguf.u64("negative").unwrap_err(), &["-1 (i32)"]);
    check(gguf.bool("count").unwrap_err(), &["1 (u32)", "true or false"]);
    check(gguf.i32s("tokens").unwrap_err(), &["an array of 2 strings"]);
    check(gguf.string("tokens").unwrap_err(), &["a string is needed"]);
}

#[test]
fn tensors_lie_at_the_alignment_that_the_file_says() {
    for alignment in [1, 32, 64, 4096] {
        let mut writer = GgufWriter::new();
        if alignment != 32 {
            writer.alignment(alignment);
        }
        writer.string("pad", "xyz").tensor("a", DType::F16, &[3], &[1; 6]).tensor(
            "b",
            DType::F32,
            &[2, 1],
            &[2; 8],
        );
        let gguf = read(&writer).unwrap();
        let [a, b] = gguf.tensors() else { panic!("two tensors") };
        let bytes = (**gguf.owner()).as_ref();
        assert_eq!(a.start % alignment as usize, 0);
        assert_eq!(b.start - a.start, 6_usize.next_multiple_of(alignment as usize));
        assert_eq!(&bytes[a.start..a.start + a.len], [1; 6]);
        assert_eq!(&bytes[b.start..b.start + b.len], [2; 8]);
        assert_eq!(b.shape, [2, 1], "slowest first");
    }
}

#[test]
fn versions_2_and_3_are_read_and_others_named() {
    let with = |version| {
        let mut writer = GgufWriter::new();
        writer.version(version).u32("k", 1);
        writer
    };
    assert_eq!(read(&with(2)).unwrap().version(), 2);
    assert!(refused(&with(1)).contains("GGUF version 1"));
    assert!(refused(&with(4)).contains("GGUF version 4"));
    assert!(refused(&with(3_u32.swap_bytes())).contains("big-endian"));
    let error = Gguf::from_bytes(b"PK\x03\x04".to_vec(), Path::new("x")).unwrap_err().to_string();
    assert!(error.contains("does not begin with the letters GGUF"), "{error}");
}

#[test]
fn counts_and_lengths_beyond_the_file_are_refused_before_anything_is_allocated() {
    let claiming = |tensors, values| {
        let bytes = GgufWriter::new().u32("k", 1).finish_claiming(tensors, values);
        Gguf::from_bytes(bytes, Path::new("x")).unwrap_err().to_string()
    };
    assert!(claiming(u64::MAX, 1).contains("18446744073709551615 tensors"));
    assert!(claiming(1 << 40, 1).contains("1099511627776 tensors"));
    assert!(claiming(0, u64::MAX).contains("18446744073709551615 metadata keys"));
    assert!(claiming(0, 1000).contains("1000 metadata keys"));

    let value = |kind: Kind, bytes: &[u8]| refused(GgufWriter::new().value("k", kind as u32, bytes));
    let array = |kind: u32, count: u64| {
        let bytes: Vec<u8> = kind.to_le_bytes().into_iter().chain(count.to_le_bytes()).collect();
        value(Kind::Array, &bytes)
    };
    assert!(value(Kind::Text, &u64::MAX.to_le_bytes()).contains("18446744073709551615 bytes"));
    assert!(array(Kind::U8 as u32, u64::MAX).contains("18446744073709551615 elements"));
    assert!(array(Kind::U64 as u32, u64::MAX / 8 + 2).contains("elements of \"k\""));
    assert!(array(Kind::Text as u32, 1 << 50).contains("1125899906842624 elements"));
    assert!(array(Kind::Array as u32, 1).contains("an array of arrays"));
    assert!(array(99, 1).contains("unknown type 99"));
}

#[test]
fn values_that_are_none_are_refused() {
    let value = |kind: u32, bytes: &[u8]| refused(GgufWriter::new().value("k", kind, bytes));
    assert!(value(13, &[0; 8]).contains("unknown type 13"));
    assert!(value(Kind::Bool as u32, &[7]).contains("bool of 7"));
    let text = [&4_u64.to_le_bytes()[..], b"ab\xff\xfe"].concat();
    assert!(value(Kind::Text as u32, &text).contains("not valid UTF-8 after 2 of 4 bytes"));
    let bools = [&(Kind::Bool as u32).to_le_bytes()[..], &2_u64.to_le_bytes(), &[1, 2]].concat();
    assert!(value(Kind::Array as u32, &bools).contains("bool of 2"));
    assert!(refused(GgufWriter::new().u32("k", 1).u32("k", 2)).contains("\"k\" appears twice"));
    assert!(refused(GgufWriter::new().u32(&"k".repeat(70_000), 1)).contains("70000 bytes"));
}

#[test]
fn alignments_that_align_nothing_are_refused() {
    for (alignment, found) in [(0, "is 0 (u32)"), (24, "is 24 (u32)"), (1 << 31, "is 2147483648 (u32)")] {
        // Written as a plain key: the writer would try to pad to it.
        let error = refused(GgufWriter::new().u32("general.alignment", alignment));
        assert!(error.contains("general.alignment") && error.contains(found), "{error}");
    }
    assert!(refused(GgufWriter::new().string("general.alignment", "32")).contains("a string of 2 bytes"));
}

#[test]
fn impossible_tensors_are_refused_with_the_numbers() {
    const F32: u32 = 0;
    const Q8_0: u32 = 8;
    let max = u64::MAX;
    for (sizes, type_number, offset, expected) in [
        (&[4][..], F32, 32, "lies at bytes 32 + 16 of a data section of 32 bytes"),
        (&[8], F32, 32, "32 + 32 of a data section of 32"),
        (&[9], F32, 0, "0 + 36 of a data section of 32"),
        (&[1], F32, max - 31, "+ 4 of a data section of 32"),
        (&[4], F32, 4, "offset 4, no multiple of general.alignment = 32"),
        (&[max], F32, 0, "passes any file"),
        (&[max, 2], F32, 0, "impossible shape"),
        (&[1 << 32, 1 << 32], F32, 0, "impossible shape"),
        (&[1 << 40, 1 << 40, 0], F32, 0, "impossible shape"),
        (&[0, 1 << 40, 1 << 40], F32, 0, "impossible shape"),
        (&[1 << 62], Q8_0, 0, "0 + 4899916394579099648 of"),
        (&[1 << 63, 2], Q8_0, 0, "impossible shape"),
        (&[u64::MAX - 31], Q8_0, 0, "passes any file"),
        (&[16], Q8_0, 0, "rows of 16 are no multiple of 32"),
        (&[1, 1, 1, 1, 1], F32, 0, "has 5 dimensions"),
        // A type that can't be read may be of any size, but not outside of the file.
        (&[256], 10, 64, "lies at bytes 64 + 0 of a data section of 32"),
    ] {
        let mut writer = GgufWriter::new();
        writer.tensor("room", DType::F32, &[8], &[0; 32]).tensor_at("bad", type_number, sizes, offset);
        let error = refused(&writer);
        assert!(error.contains("tensor bad") && error.contains(expected), "{sizes:?}: {error}");
    }
    let twice = refused(GgufWriter::new().tensor_at("t", F32, &[0], 0).tensor_at("t", F32, &[0], 0));
    assert!(twice.contains("tensor t appears twice"), "{twice}");
}

#[test]
fn overlapping_empty_and_scalar_tensors_do_no_harm() {
    let mut writer = GgufWriter::new();
    writer.tensor("a", DType::F32, &[8], &[0; 32]).tensor_at("b", 0, &[4], 0).tensor_at("e", 0, &[0, 5], 32);
    writer.tensor_at("scalar", 0, &[], 0);
    let gguf = read(&writer).unwrap();
    let lens: Vec<usize> = gguf.tensors().iter().map(|record| record.len).collect();
    assert_eq!(lens, [32, 16, 0, 4]);
}

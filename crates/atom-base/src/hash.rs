//! FNV-1a (Fowler, Noll, Vo): the same in every process, build and host, unlike the standard hasher. It
//! finds accidents, not attacks.

/// What a 64-bit hash begins with.
pub const FNV_64: u64 = 0xcbf2_9ce4_8422_2325;
/// What a 32-bit hash begins with.
pub const FNV_32: u32 = 0x811c_9dc5;

/// Goes on from `hash` over symbols: bytes as the authors have it, or wider words, each in one round.
pub fn fnv1a_64(hash: u64, symbols: impl IntoIterator<Item = impl Into<u64>>) -> u64 {
    symbols.into_iter().fold(hash, |hash, symbol| (hash ^ symbol.into()).wrapping_mul(0x0000_0100_0000_01b3))
}

/// Goes on from `hash` over bytes. A round is a bijection of the state, so one changed byte always shows.
pub fn fnv1a_32(hash: u32, bytes: &[u8]) -> u32 {
    bytes.iter().fold(hash, |hash, &byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the authors' test suite (`test_fnv.c`).
    #[test]
    fn fnv_gives_the_published_known_answers() {
        for (text, wide, narrow) in [
            ("", FNV_64, FNV_32),
            ("a", 0xaf63_dc4c_8601_ec8c, 0xe40c_292c),
            ("foobar", 0x8594_4171_f739_67e8, 0xbf9c_f968),
        ] {
            assert_eq!(fnv1a_64(FNV_64, text.bytes()), wide, "{text}");
            assert_eq!(fnv1a_32(FNV_32, text.as_bytes()), narrow, "{text}");
        }
        assert_eq!(fnv1a_64(fnv1a_64(FNV_64, *b"foo"), *b"bar"), fnv1a_64(FNV_64, *b"foobar"));
    }
}

//! Numbers to bytes and back, and the frame around each record.

use super::TraceError;
use atom_base::hash::{FNV_32, fnv1a_32};

/// Bytes of a frame beside its payload: length, its complement, checksum.
pub(super) const FRAME_BYTES: usize = 8;

/// Little-endian base 128, as in protocol buffers: small numbers are short.
pub(super) fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// The step from `from` to `to`, forwards or back: near ones are short.
pub(super) fn put_difference(out: &mut Vec<u8>, from: u64, to: u64) {
    let difference = to.wrapping_sub(from) as i64;
    put_varint(out, (difference << 1 ^ difference >> 63) as u64);
}

pub(super) fn put_word(out: &mut Vec<u8>, word: u64) {
    out.extend_from_slice(&word.to_le_bytes());
}

/// `None` is 0.
pub(super) fn put_option(out: &mut Vec<u8>, value: Option<u32>) {
    put_varint(out, value.map_or(0, |value| u64::from(value) + 1));
}

/// Appends a frame with what `payload` writes. `chain` is the checksum of the frame before, so a frame
/// that is missing or out of place shows too.
pub(super) fn put_frame(out: &mut Vec<u8>, chain: &mut u32, payload: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&[0; HEAD_BYTES]);
    payload(out);
    let length = out.len() - start - HEAD_BYTES;
    let length = u16::try_from(length).expect("no record of 64 lanes or 128 sizes is as long");
    out[start..start + 2].copy_from_slice(&length.to_le_bytes());
    out[start + 2..start + HEAD_BYTES].copy_from_slice(&(!length).to_le_bytes());
    *chain = checksum(*chain, &out[start..]);
    out.extend_from_slice(&chain.to_le_bytes());
}

/// The payload of the frame that begins at `offset`, and where the next begins. `None`: the bytes end
/// before the frame does.
pub(super) fn take_frame<'a>(
    bytes: &'a [u8],
    offset: usize,
    chain: &mut u32,
) -> Result<Option<(Cursor<'a>, usize)>, TraceError> {
    let rest = &bytes[offset..];
    let Some((head, after)) = rest.split_first_chunk::<HEAD_BYTES>() else { return Ok(None) };
    let [a, b, c, d] = *head;
    let length = u16::from_le_bytes([a, b]);
    if u16::from_le_bytes([c, d]) != !length {
        return Err(TraceError::Corrupt { offset, what: "the length of a record" });
    }
    let length = usize::from(length);
    let Some((payload, after)) = after.split_at_checked(length) else { return Ok(None) };
    let Some(written) = after.first_chunk() else { return Ok(None) };
    let found = checksum(*chain, &rest[..HEAD_BYTES + length]);
    if found != u32::from_le_bytes(*written) {
        return Err(TraceError::Corrupt { offset, what: "the checksum of a record" });
    }
    *chain = found;
    let cursor = Cursor { bytes: payload, at: 0, offset: offset + HEAD_BYTES };
    Ok(Some((cursor, offset + FRAME_BYTES + length)))
}

fn checksum(chain: u32, bytes: &[u8]) -> u32 {
    fnv1a_32(chain ^ FNV_32, bytes)
}

/// Reads a payload.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Of the payload in the file.
    offset: usize,
}

impl Cursor<'_> {
    pub(super) fn byte(&mut self, what: &'static str) -> Result<u8, TraceError> {
        let byte = *self.bytes.get(self.at).ok_or_else(|| self.corrupt(what))?;
        self.at += 1;
        Ok(byte)
    }

    pub(super) fn varint(&mut self, what: &'static str) -> Result<u64, TraceError> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte(what)?;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                break;
            }
            value |= bits << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(self.corrupt(what))
    }

    /// A varint that fits.
    pub(super) fn number<T: TryFrom<u64>>(&mut self, what: &'static str) -> Result<T, TraceError> {
        let value = self.varint(what)?;
        T::try_from(value).map_err(|_| self.corrupt(what))
    }

    pub(super) fn difference(&mut self, from: u64, what: &'static str) -> Result<u64, TraceError> {
        let folded = self.varint(what)?;
        Ok(from.wrapping_add(folded >> 1 ^ (folded & 1).wrapping_neg()))
    }

    pub(super) fn word(&mut self, what: &'static str) -> Result<u64, TraceError> {
        let word = *self.bytes[self.at..].first_chunk().ok_or_else(|| self.corrupt(what))?;
        self.at += size_of::<u64>();
        Ok(u64::from_le_bytes(word))
    }

    pub(super) fn option(&mut self, what: &'static str) -> Result<Option<u32>, TraceError> {
        let value = self.varint(what)?;
        let value = value.checked_sub(1).map(u32::try_from).transpose();
        value.map_err(|_| self.corrupt(what))
    }

    pub(super) fn text(&mut self, what: &'static str) -> Result<String, TraceError> {
        let length: usize = self.number(what)?;
        let rest = &self.bytes[self.at..];
        let text = rest.get(..length).and_then(|bytes| std::str::from_utf8(bytes).ok());
        let text = text.ok_or_else(|| self.corrupt(what))?.to_owned();
        self.at += length;
        Ok(text)
    }

    pub(super) fn finish(&self) -> Result<(), TraceError> {
        let left = self.bytes.len() - self.at;
        if left == 0 { Ok(()) } else { Err(self.corrupt("the end of a record")) }
    }

    pub(super) fn corrupt(&self, what: &'static str) -> TraceError {
        TraceError::Corrupt { offset: self.offset + self.at, what }
    }
}

/// Length and its complement.
const HEAD_BYTES: usize = 4;

//! Bodies that are kept for the request log until they are written down, within bounds: on each, and on all of
//! them together.

use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How many bytes of bodies may be kept, of all requests together.
#[derive(Clone, Debug)]
pub(crate) struct ContentRoom {
    taken: Arc<AtomicUsize>,
    max: usize,
}

/// A body, or how much of it there was.
#[derive(Debug)]
pub(crate) struct Kept {
    room: ContentRoom,
    bytes: Vec<u8>,
    size: usize,
    cut: Option<Cut>,
}

/// Why a body is not kept.
#[derive(Clone, Copy, Debug)]
enum Cut {
    TooLarge,
    NoRoom,
}

impl ContentRoom {
    pub(crate) fn new(max: usize) -> Self {
        Self { taken: Arc::default(), max }
    }

    pub(crate) fn keep(&self) -> Kept {
        Kept { room: self.clone(), bytes: Vec::new(), size: 0, cut: None }
    }
}

impl Kept {
    /// Takes more of the body. What is too large is given up as a whole: in a part of it, a secret could not be
    /// found.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.size += bytes.len();
        if self.cut.is_some() {
            return;
        }
        if self.size > CONTENT_BYTES_MAX {
            return self.give_up(Cut::TooLarge);
        }
        let before = self.room.taken.fetch_add(bytes.len(), Ordering::Relaxed);
        self.bytes.extend_from_slice(bytes);
        if before + bytes.len() > self.room.max {
            self.give_up(Cut::NoRoom);
        }
    }

    /// As JSON if it is, else as text; of one that was given up its size and why.
    pub(crate) fn shown(&self) -> Value {
        let max = match self.cut {
            None if self.size == 0 => return Value::Null,
            None => {
                let text = || String::from_utf8_lossy(&self.bytes).into();
                return serde_json::from_slice(&self.bytes).unwrap_or_else(|_| text());
            }
            Some(Cut::TooLarge) => format!("more than {CONTENT_BYTES_MAX} bytes"),
            Some(Cut::NoRoom) => format!("the log holds {} bytes of other requests", self.room.max),
        };
        json!({"omitted_bytes": self.size, "because": max})
    }

    fn give_up(&mut self, cut: Cut) {
        self.leave();
        self.cut = Some(cut);
    }

    fn leave(&mut self) {
        self.room.taken.fetch_sub(self.bytes.len(), Ordering::Relaxed);
        self.bytes = Vec::new();
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Bytes of a body that are written down.
const CONTENT_BYTES_MAX: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_that_find_no_room_are_named_by_their_size_and_leave_it_to_others() {
        let room = ContentRoom::new(100);
        let (mut one, mut two) = (room.keep(), room.keep());
        assert_eq!(one.shown(), Value::Null);
        one.push(br#"{"a": "#);
        one.push(b"1}");
        two.push(&[b'x'; 90]);
        two.push(&[b'x'; 9]);
        assert_eq!(one.shown(), json!({"a": 1}));
        let cut = json!({"omitted_bytes": 99, "because": "the log holds 100 bytes of other requests"});
        assert_eq!(two.shown(), cut);
        assert_eq!(room.taken.load(Ordering::Relaxed), 8);
        let mut three = room.keep();
        three.push(&[b'y'; 92]);
        assert_eq!(three.shown(), "y".repeat(92));
        drop((one, two, three));
        assert_eq!(room.taken.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_body_that_is_too_large_is_given_up_at_once() {
        let room = ContentRoom::new(usize::MAX);
        let mut large = room.keep();
        for _ in 0..5 {
            large.push(&[b'x'; CONTENT_BYTES_MAX / 4]);
            large.push(b"!");
        }
        assert_eq!((large.bytes.capacity(), room.taken.load(Ordering::Relaxed)), (0, 0));
        let size = 5 * (CONTENT_BYTES_MAX / 4 + 1);
        assert_eq!(large.shown(), json!({"omitted_bytes": size, "because": "more than 1048576 bytes"}));
    }
}

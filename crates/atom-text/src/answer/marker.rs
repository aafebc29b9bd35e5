//! Finds markers in text that comes character by character.

/// Text that may yet become a marker. At most one marker less a character is held.
#[derive(Clone, Debug, Default)]
pub(super) struct MarkerScan {
    held: String,
}

/// What the scan knows after a character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scan {
    /// Nothing before the next character.
    Wait,
    /// This character is no part of a marker; ask again.
    Text(char),
    /// The marker with this index is complete.
    Marker(usize),
}

impl MarkerScan {
    /// Takes a character; then ask [`next`](Self::next) until it says [`Scan::Wait`] or [`Scan::Marker`].
    pub(super) fn push(&mut self, c: char) {
        self.held.push(c);
    }

    /// The marker that begins first wins. No marker of a set may be the beginning of another one.
    pub(super) fn next(&mut self, markers: &[&str]) -> Scan {
        if self.held.is_empty() {
            return Scan::Wait;
        }
        if let Some(index) = markers.iter().position(|marker| *marker == self.held) {
            self.held.clear();
            return Scan::Marker(index);
        }
        if markers.iter().any(|marker| marker.starts_with(self.held.as_str())) {
            return Scan::Wait;
        }
        Scan::Text(self.held.remove(0))
    }

    /// True while there is a beginning of a marker.
    pub(super) fn is_holding(&self) -> bool {
        !self.held.is_empty()
    }

    /// The end of the text: the beginning of a marker that doesn't come.
    pub(super) fn take(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_marker_wins_and_near_misses_are_text() {
        let markers = ["<a>", "<ab>", "[x]"];
        let cases = [
            ("1<a>2", "1{0}2"),
            ("<<a>", "<{0}"),
            ("<ab><ac>", "{1}<ac>"),
            ("[<a>]", "[{0}]"),
            ("[[x]<", "[{2}<"),
        ];
        for (text, expected) in cases {
            let mut scan = MarkerScan::default();
            let mut seen = String::new();
            for c in text.chars() {
                scan.push(c);
                loop {
                    match scan.next(&markers) {
                        Scan::Wait => break,
                        Scan::Text(c) => seen.push(c),
                        Scan::Marker(index) => seen.push_str(&format!("{{{index}}}")),
                    }
                }
            }
            assert_eq!(seen + &scan.take(), expected, "{text}");
        }
    }
}

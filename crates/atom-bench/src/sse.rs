//! Server-sent events, as far as completion streams use them: the `data` of each event.
//!
//! Source: the HTML standard, section "Server-sent events".

/// Cuts a stream of bytes into events, wherever the network cut it before.
#[derive(Debug, Default)]
pub(crate) struct EventParser {
    line: Vec<u8>,
    data: Vec<u8>,
    has_data: bool,
}

/// A line that goes on for longer is not an event stream.
const LINE_BYTES_MAX: usize = 4 << 20;

impl EventParser {
    /// Feeds bytes and hands each finished event's data to `take`, in order.
    ///
    /// The error says that a line exceeds its bound.
    pub(crate) fn push(
        &mut self,
        mut bytes: &[u8],
        mut take: impl FnMut(&[u8]) -> Result<(), crate::error::Failure>,
    ) -> Result<(), crate::error::Failure> {
        while let Some(end) = bytes.iter().position(|&byte| byte == b'\n') {
            self.line.extend_from_slice(&bytes[..end]);
            bytes = &bytes[end + 1..];
            if self.line.last() == Some(&b'\r') {
                self.line.pop();
            }
            if self.line.is_empty() {
                if self.has_data {
                    take(&self.data)?;
                }
                self.data.clear();
                self.has_data = false;
            } else if let Some(value) = self.line.strip_prefix(b"data:") {
                if self.has_data {
                    self.data.push(b'\n');
                }
                self.data.extend_from_slice(value.strip_prefix(b" ").unwrap_or(value));
                self.has_data = true;
            }
            // Other fields and comments (`: ping`) carry nothing for us.
            self.line.clear();
        }
        self.line.extend_from_slice(bytes);
        if self.line.len().max(self.data.len()) > LINE_BYTES_MAX {
            return Err(crate::error::Failure::new(
                crate::error::FailureKind::Protocol,
                format!("an event of more than {LINE_BYTES_MAX} bytes"),
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(pieces: &[&[u8]]) -> Vec<String> {
        let mut parser = EventParser::default();
        let mut found = Vec::new();
        for piece in pieces {
            let take = |data: &[u8]| {
                found.push(String::from_utf8(data.to_vec()).unwrap());
                Ok(())
            };
            parser.push(piece, take).unwrap();
        }
        found
    }

    #[test]
    fn events_do_not_depend_on_where_the_network_cuts() {
        let stream = b": ping\n\ndata: {\"a\": 1}\r\n\r\nevent: x\ndata:b\ndata: c\nid: 7\n\ndata:\n\ndata: [DONE]\n\ndata: lost";
        let expected = ["{\"a\": 1}", "b\nc", "", "[DONE]"];
        assert_eq!(events(&[stream]), expected);
        for cut in 0..stream.len() {
            assert_eq!(events(&[&stream[..cut], &stream[cut..]]), expected, "cut at {cut}");
        }
        let bytes: Vec<&[u8]> = stream.chunks(1).collect();
        assert_eq!(events(&bytes), expected);
    }

    #[test]
    fn an_endless_line_is_refused() {
        let mut parser = EventParser::default();
        let piece = vec![b'x'; 1 << 20];
        let refused = (0..8).any(|_| parser.push(&piece, |_| Ok(())).is_err());
        assert!(refused && parser.line.len() <= LINE_BYTES_MAX + piece.len());
    }
}

//! A writer of SVG: what is opened is closed, what is written is escaped.

use std::fmt::{Display, Write};

/// A document in the making.
pub(crate) struct Svg {
    text: String,
    open: Vec<&'static str>,
}

impl Svg {
    /// `width`, `height`: pixels.
    pub(crate) fn new(width: usize, height: usize) -> Self {
        let mut svg = Self { text: String::new(), open: Vec::new() };
        let view = format!("0 0 {width} {height}");
        let attributes: [(&str, &dyn Display); 6] = [
            ("xmlns", &"http://www.w3.org/2000/svg"),
            ("width", &width),
            ("height", &height),
            ("viewBox", &view),
            ("font-family", &"sans-serif"),
            ("font-size", &11),
        ];
        svg.open("svg", &attributes);
        svg
    }

    /// Begins an element; what follows is in it until [`close`](Self::close).
    pub(crate) fn open(&mut self, name: &'static str, attributes: &[(&str, &dyn Display)]) {
        self.tag(name, attributes);
        self.text.push('>');
        self.open.push(name);
    }

    /// Ends the last element that was begun.
    pub(crate) fn close(&mut self) {
        let name = self.open.pop().expect("there is one for each call");
        writeln!(self.text, "</{name}>").expect("a string takes all");
    }

    /// An element without content.
    pub(crate) fn element(&mut self, name: &str, attributes: &[(&str, &dyn Display)]) {
        self.tag(name, attributes);
        self.text.push_str("/>");
    }

    /// An element with text.
    pub(crate) fn text(&mut self, name: &'static str, attributes: &[(&str, &dyn Display)], text: &str) {
        self.open(name, attributes);
        escape(&mut self.text, text);
        self.close();
    }

    /// The whole document.
    pub(crate) fn finish(mut self) -> String {
        while !self.open.is_empty() {
            self.close();
        }
        self.text
    }

    fn tag(&mut self, name: &str, attributes: &[(&str, &dyn Display)]) {
        write!(self.text, "<{name}").expect("a string takes all");
        for (key, value) in attributes {
            write!(self.text, " {key}=\"").expect("a string takes all");
            escape(&mut self.text, &value.to_string());
            self.text.push('"');
        }
    }
}

/// For content and for values in double quotes. Characters that XML can't hold become U+FFFD.
fn escape(out: &mut String, text: &str) {
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\n' | '\t' => out.push(c),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_and_values_are_escaped_and_all_is_closed() {
        let mut svg = Svg::new(10, 20);
        svg.open("g", &[("id", &"a\"b<c>&d\u{1}")]);
        svg.text("title", &[], "1 < 2 & \"3\" > 0");
        svg.element("rect", &[("x", &1), ("y", &2)]);
        let text = svg.finish();
        assert!(text.contains("<g id=\"a&quot;b&lt;c&gt;&amp;d\u{fffd}\">"), "{text}");
        assert!(text.contains("<title>1 &lt; 2 &amp; &quot;3&quot; &gt; 0</title>"), "{text}");
        assert!(text.contains("<rect x=\"1\" y=\"2\"/>") && text.ends_with("</g>\n</svg>\n"), "{text}");
    }
}

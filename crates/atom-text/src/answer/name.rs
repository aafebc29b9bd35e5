//! Names of functions, where nothing but their characters tells them from prose.

/// A name that is being read.
#[derive(Clone, Debug, Default)]
pub(super) struct NameText {
    text: String,
    is_over: bool,
}

impl NameText {
    /// Takes a character: of the name, or white space around it. False for what no name has.
    pub(super) fn push(&mut self, c: char) -> bool {
        if c.is_whitespace() {
            self.is_over = !self.text.is_empty();
            return true;
        }
        if self.is_over || self.text.len() >= NAME_BYTES_MAX || !is_of_name(c) {
            return false;
        }
        self.text.push(c);
        true
    }

    /// The name, if there is one.
    pub(super) fn name(&self) -> Option<&str> {
        (!self.text.is_empty()).then_some(self.text.as_str())
    }
}

/// Letters, digits, and what separates name spaces in one model or another.
fn is_of_name(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/' | '$')
}

/// Bytes of a name or of the opening tag around it. Clients may use 64 characters.
pub(super) const NAME_BYTES_MAX: usize = 512;

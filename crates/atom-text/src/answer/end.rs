//! How an answer ends, and what its end leaves of calls.

/// How an answer came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerEnd {
    /// The model ended it. What it left out of a call is made good where there is only one way.
    Whole,
    /// Somebody else did, at a bound or a stop string: the model would have gone on.
    Cut,
}

impl AnswerEnd {
    /// What of a text is said that could have become a marker. Of a cut answer only punctuation is: an answer may be one
    /// bracket, and further than that it began a marker.
    pub(super) fn held(self, held: String) -> String {
        let is_marker = self == Self::Cut && held.contains(char::is_alphanumeric);
        if is_marker { String::new() } else { held }
    }
}

/// What the end of an answer leaves of calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Left {
    /// What came since the last call, or since the opening marker, is text.
    Text,
    /// That is the beginning of the format's own frame or of a call without a name, and says nothing.
    Frame,
    /// A call that has all of its arguments.
    Call,
    /// A call that lacks some.
    CutCall,
    /// The format is to read this text once more before its end, which is another thing than it seemed.
    Again(String),
}

impl Left {
    /// Of a call that has no name.
    pub(super) fn unnamed(end: AnswerEnd) -> Self {
        match end {
            AnswerEnd::Whole => Self::Text,
            AnswerEnd::Cut => Self::Frame,
        }
    }
}

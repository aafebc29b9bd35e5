//! The parts of an answer as content blocks: at most one is open, and they are numbered in order.
//!
//! The stream and the whole answer are both made from what [`Blocks`] says.

use super::signature::Signer;
use crate::chat::history::CallIds;
use atom_text::AnswerPart;

/// Opens and closes blocks as the kind of the parts changes.
pub(super) struct Blocks {
    ids: CallIds,
    open: Option<Open>,
    /// Number of the next block.
    next: u32,
    thinking: Thinking,
    /// Calls whose arguments have begun.
    calls_with_arguments: u32,
}

/// What the client sees of the model's thinking.
pub(super) enum Thinking {
    Shown,
    /// That there was some: its blocks are empty, and signed as such.
    Omitted,
    /// Nothing, and what it didn't see so far: it comes out after all when the answer has nothing else,
    /// since an empty one would be a riddle.
    Hidden(String),
}

/// What happens to a block.
#[derive(Debug)]
pub(super) enum Event<'a> {
    Start(Start<'a>),
    Delta(Delta<'a>),
    Stop,
}

/// How a block begins.
#[derive(Debug)]
pub(super) enum Start<'a> {
    Text,
    Thinking,
    ToolUse { id: &'a str, name: &'a str },
}

/// How a block goes on. A signature ends a thinking block.
#[derive(Debug)]
pub(super) enum Delta<'a> {
    Text(&'a str),
    Thinking(&'a str),
    Signature(&'a str),
    InputJson(&'a str),
}

enum Open {
    Text,
    Thinking(Signer),
    /// The call of this index.
    Call(u32),
}

impl Blocks {
    pub(super) fn new(ids: CallIds, thinking: Thinking) -> Self {
        Self { ids, open: None, next: 0, thinking, calls_with_arguments: 0 }
    }

    /// Takes the next part and emits events with the number of their block.
    pub(super) fn part(&mut self, part: &AnswerPart, emit: &mut impl FnMut(u32, Event<'_>)) {
        match part {
            AnswerPart::Content(text) => {
                if !matches!(self.open, Some(Open::Text)) {
                    self.start(Open::Text, Start::Text, emit);
                }
                emit(self.next - 1, Event::Delta(Delta::Text(text)));
            }
            AnswerPart::Reasoning(text) => match &mut self.thinking {
                Thinking::Shown => self.think(text, emit),
                Thinking::Omitted => self.start_thinking(emit),
                Thinking::Hidden(unseen) => unseen.push_str(text),
            },
            AnswerPart::Call { index, id, name } => {
                let id = id.clone().unwrap_or_else(|| self.ids.of(0, *index));
                self.start(Open::Call(*index), Start::ToolUse { id: &id, name }, emit);
            }
            AnswerPart::Arguments { index, json } => {
                let is_open = matches!(self.open, Some(Open::Call(open)) if open == *index);
                assert!(is_open, "arguments of call {index} behind the end of its block");
                self.calls_with_arguments = self.calls_with_arguments.max(index + 1);
                emit(self.next - 1, Event::Delta(Delta::InputJson(json)));
            }
        }
    }

    /// The answer is over.
    pub(super) fn finish(&mut self, emit: &mut impl FnMut(u32, Event<'_>)) {
        if self.next == 0
            && let Thinking::Hidden(unseen) = &mut self.thinking
            && !unseen.is_empty()
        {
            let unseen = std::mem::take(unseen);
            self.think(&unseen, emit);
        }
        self.stop(emit);
    }

    /// A call has come with its arguments: a bare name is none that anybody could follow.
    pub(super) fn calls(&self) -> bool {
        self.calls_with_arguments > 0
    }

    fn start_thinking(&mut self, emit: &mut impl FnMut(u32, Event<'_>)) {
        if !matches!(self.open, Some(Open::Thinking(_))) {
            self.start(Open::Thinking(Signer::new()), Start::Thinking, emit);
        }
    }

    fn think(&mut self, text: &str, emit: &mut impl FnMut(u32, Event<'_>)) {
        self.start_thinking(emit);
        if let Some(Open::Thinking(signer)) = &mut self.open {
            signer.push(text);
        }
        emit(self.next - 1, Event::Delta(Delta::Thinking(text)));
    }

    fn start(&mut self, open: Open, start: Start<'_>, emit: &mut impl FnMut(u32, Event<'_>)) {
        self.stop(emit);
        self.open = Some(open);
        emit(self.next, Event::Start(start));
        self.next += 1;
    }

    fn stop(&mut self, emit: &mut impl FnMut(u32, Event<'_>)) {
        let Some(open) = self.open.take() else { return };
        if let Open::Thinking(signer) = open {
            emit(self.next - 1, Event::Delta(Delta::Signature(&signer.sign())));
        }
        emit(self.next - 1, Event::Stop);
    }
}

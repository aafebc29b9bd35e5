//! A planned grammar in the notation of Lark.

use super::lexemes::{Part, Plan};
use super::{Ebnf, Node};
use crate::grammar::source::quote;
use std::collections::HashMap;
use std::fmt::Write;

/// Rules are `r1`, terminals `T1` where they stand in rules and `R1` where they are rules themselves.
pub(super) fn lark(ebnf: &Ebnf, plan: &Plan) -> String {
    let mut writer = Writer {
        ebnf,
        lark: String::new(),
        terminals: HashMap::new(),
        waiting: Vec::new(),
        written: vec![false; ebnf.rules.len()],
    };
    _ = writeln!(writer.lark, "start: r{}", ebnf.root);
    let mut names = Vec::with_capacity(plan.lexemes.len());
    let mut terminals = String::new();
    for &node in &plan.lexemes {
        let text = writer.terminal(node, Place::Option);
        let count = writer.terminals.len();
        let name = *writer.terminals.entry(text).or_insert_with_key(|text| {
            _ = writeln!(terminals, "T{count}: {text}");
            count
        });
        names.push(name);
    }
    for (rule, part) in &plan.rules {
        let text = part_text(part, &names, Place::Option);
        _ = writeln!(writer.lark, "r{rule}: {text}");
    }
    writer.lark.push_str(&terminals);
    while let Some(rule) = writer.waiting.pop() {
        let text = writer.terminal(ebnf.rules[rule].body, Place::Option);
        _ = writeln!(writer.lark, "R{rule}: {text}");
    }
    writer.lark
}

/// What an expression is part of: what binds weaker is put into parentheses.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
enum Place {
    Option,
    Sequence,
    Repeat,
}

struct Writer<'a> {
    ebnf: &'a Ebnf,
    lark: String,
    terminals: HashMap<String, usize>,
    /// Rules that terminals name and that are still to be written.
    waiting: Vec<usize>,
    written: Vec<bool>,
}

impl Writer<'_> {
    fn terminal(&mut self, node: usize, place: Place) -> String {
        match &self.ebnf.nodes[node] {
            Node::Chars(ranges) => class(ranges),
            Node::Text(text) => quote(text),
            &Node::Rule(rule) => {
                if !std::mem::replace(&mut self.written[rule], true) {
                    self.waiting.push(rule);
                }
                format!("R{rule}")
            }
            Node::Sequence(parts) => {
                let parts = parts.iter().map(|&part| self.terminal(part, Place::Sequence)).collect();
                sequence(parts, place)
            }
            Node::Choice(parts) => {
                choice(parts.iter().map(|&part| self.terminal(part, Place::Option)).collect(), place)
            }
            &Node::Repeat { of, least, most } => {
                repeat(&self.terminal(of, Place::Repeat), least, most, place)
            }
        }
    }
}

fn part_text(part: &Part, names: &[usize], place: Place) -> String {
    let all = |parts: &[Part], place| parts.iter().map(|part| part_text(part, names, place)).collect();
    match part {
        Part::Lexeme(lexeme) => format!("T{}", names[*lexeme]),
        Part::Rule(rule) => format!("r{rule}"),
        Part::Sequence(parts) => sequence(all(parts, Place::Sequence), place),
        Part::Choice(parts) => choice(all(parts, Place::Option), place),
        Part::Repeat(of, least, most) => repeat(&part_text(of, names, Place::Repeat), *least, *most, place),
    }
}

fn sequence(parts: Vec<String>, place: Place) -> String {
    match &parts[..] {
        [] => NOTHING.into(),
        // Lark takes two signs of repetition for none at all.
        [only] if place < Place::Repeat => only.clone(),
        _ if place == Place::Repeat => format!("({})", parts.join(" ")),
        _ => parts.join(" "),
    }
}

fn choice(parts: Vec<String>, place: Place) -> String {
    let text = parts.join(" | ");
    if place == Place::Option { text } else { format!("({text})") }
}

fn repeat(of: &str, least: u32, most: Option<u32>, place: Place) -> String {
    let text = match (least, most) {
        (_, Some(0)) => return NOTHING.into(),
        (0, None) => format!("{of}*"),
        (1, None) => format!("{of}+"),
        (0, Some(1)) => format!("{of}?"),
        (least, None) => format!("{of}{{{least},}}"),
        (least, Some(most)) => format!("{of}{{{least},{most}}}"),
    };
    if place == Place::Repeat { format!("({text})") } else { text }
}

fn class(ranges: &[(char, char)]) -> String {
    let mut text = String::from("/[");
    for &(first, last) in ranges {
        _ = write!(text, "\\x{{{:x}}}-\\x{{{:x}}}", first as u32, last as u32);
    }
    text + "]/"
}

const NOTHING: &str = "\"\"";

//! Whether the pieces of a format can be told apart by a parser that reads each as long as it goes on.

use super::lower::{Lowered, Part, Piece, PieceKind, Text};
use crate::grammar::first_line;
use llguidance::api::{StopReason, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::sync::{Arc, OnceLock};

/// Characters that something may begin with; none: any.
type Chars = Option<BTreeSet<char>>;

/// Refuses what the parser would not find the end of, with its place.
pub(super) fn check(lowered: &Lowered) -> Result<(), String> {
    let mut behind = vec![BTreeSet::new(); lowered.pieces.len()];
    walk(lowered, &lowered.whole, &BTreeSet::new(), &mut behind);
    let mut checks = Checks { lowered, behind: &behind, left: CHECKS_MAX, met: BTreeSet::new() };
    // Each by itself first: that says most.
    for piece in 0..lowered.pieces.len() {
        checks.beside(&BTreeSet::from([piece]))?;
        checks.behind(piece)?;
    }
    checks.beside(&first(lowered, &lowered.whole).0)?;
    for pieces in &behind {
        checks.beside(pieces)?;
    }
    Ok(())
}

struct Checks<'a> {
    lowered: &'a Lowered,
    behind: &'a [BTreeSet<usize>],
    /// Regular expressions that are still compared.
    left: usize,
    met: BTreeSet<(usize, usize)>,
}

impl<'a> Checks<'a> {
    /// Pieces that may stand at one place.
    fn beside(&mut self, pieces: &BTreeSet<usize>) -> Result<(), String> {
        for &one in pieces {
            for &other in pieces {
                if self.met.insert((one, other)) {
                    self.pair(one, other)?;
                }
            }
        }
        Ok(())
    }

    fn pair(&mut self, one: usize, other: usize) -> Result<(), String> {
        let (ended, goes_on) = (self.piece(one), self.piece(other));
        let is_conflict = match (&ended.kind, &goes_on.kind) {
            (PieceKind::Text(text), PieceKind::Text(longer)) => {
                let follows = self.first_of(&self.behind[one]);
                let is_last = follows.as_ref().is_some_and(BTreeSet::is_empty);
                !is_last && self.goes_on(text, longer, &follows)?
            }
            (PieceKind::Text(text), PieceKind::Json(_)) => {
                let json = first_chars(goes_on);
                self.begins(text, &json)?
            }
            (PieceKind::Grammar(..), _) => one != other,
            (PieceKind::Json(_), _) | (PieceKind::Text(_), PieceKind::Grammar(..)) => false,
        };
        if !is_conflict {
            return Ok(());
        }
        Err(match ended.kind {
            PieceKind::Grammar(..) => {
                format!(
                    "{}: a grammar can't be one of several options by itself: put it into a tag",
                    ended.place
                )
            }
            _ if one == other => {
                format!("{}: it can't be told where this ends and what follows begins", ended.place)
            }
            _ => format!(
                "{}: it can't be told from {} by the time that one of them ends",
                goes_on.place, ended.place
            ),
        })
    }

    /// A piece and what comes behind it.
    fn behind(&mut self, piece: usize) -> Result<(), String> {
        match &self.piece(piece).kind {
            PieceKind::Grammar(_, ending) if ending.is_empty() && !self.behind[piece].is_empty() => {
                Err(format!(
                    "{}: where a grammar ends can only be told if a const_string or the end of its tag follows",
                    self.piece(piece).place
                ))
            }
            PieceKind::Json(_) if first_chars(self.piece(piece)).is_none_or(|first| first.contains(&'0')) => {
                let number: BTreeSet<char> = "0123456789.eE+-".chars().collect();
                for &next in &self.behind[piece] {
                    if let PieceKind::Text(text) = &self.piece(next).kind
                        && self.begins(text, &Some(number.clone()))?
                    {
                        return Err(format!(
                            "{}: it can't be told where a number ends and {} begins",
                            self.piece(piece).place,
                            self.piece(next).place
                        ));
                    }
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// True if a text may end where another goes on with one of these characters.
    fn goes_on(&mut self, text: &Text, longer: &Text, follows: &Chars) -> Result<bool, String> {
        if let (Some(text), Some(longer)) = (&text.literal, &longer.literal) {
            let next = longer.strip_prefix(text.as_str()).and_then(|rest| rest.chars().next());
            return Ok(
                next.is_some_and(|next| follows.as_ref().is_none_or(|follows| follows.contains(&next)))
            );
        }
        let class = class(follows);
        self.meets(&format!("{} & ((({} & /(?s:.+)/) {class} /(?s:.*)/))", longer.value, text.value))
    }

    /// True if a text may begin with one of these characters.
    fn begins(&mut self, text: &Text, first: &Chars) -> Result<bool, String> {
        if let Some(literal) = &text.literal {
            let begin = literal.chars().next();
            return Ok(begin.is_some_and(|begin| first.as_ref().is_none_or(|first| first.contains(&begin))));
        }
        self.meets(&format!("{} & ({} /(?s:.*)/)", text.value, class(first)))
    }

    fn meets(&mut self, terminal: &str) -> Result<bool, String> {
        self.left = self.left.checked_sub(1).ok_or_else(|| {
            format!("it has too many parts beside each other: more than {CHECKS_MAX} pairs to compare")
        })?;
        Ok(!is_empty(&self.lowered.terminals, terminal)?)
    }

    fn first_of(&self, pieces: &BTreeSet<usize>) -> Chars {
        let mut all = BTreeSet::new();
        for &piece in pieces {
            all.extend(first_chars(self.piece(piece))?);
        }
        Some(all)
    }

    fn piece(&self, piece: usize) -> &'a Piece {
        &self.lowered.pieces[piece]
    }
}

/// The pieces that a part begins with, and whether it may be nothing.
fn first(lowered: &Lowered, part: &Part) -> (BTreeSet<usize>, bool) {
    match part {
        &Part::Piece(piece) => {
            let is_nullable = match &lowered.pieces[piece].kind {
                PieceKind::Text(text) => text.is_nullable,
                PieceKind::Json(_) => false,
                PieceKind::Grammar(_, ending) => ending.is_empty(),
            };
            (BTreeSet::from([piece]), is_nullable)
        }
        Part::Sequence(parts) => {
            let mut all = BTreeSet::new();
            for part in parts {
                let (pieces, is_nullable) = first(lowered, part);
                all.extend(pieces);
                if !is_nullable {
                    return (all, false);
                }
            }
            (all, true)
        }
        Part::Or(parts) => parts.iter().fold((BTreeSet::new(), false), |(mut all, nullable), part| {
            let (pieces, is_nullable) = first(lowered, part);
            all.extend(pieces);
            (all, nullable || is_nullable)
        }),
        Part::Repeat(of, least, _) => {
            let (pieces, is_nullable) = first(lowered, of);
            (pieces, is_nullable || *least == 0)
        }
    }
}

/// Notes for each piece what may come behind it.
fn walk(lowered: &Lowered, part: &Part, after: &BTreeSet<usize>, behind: &mut [BTreeSet<usize>]) {
    match part {
        &Part::Piece(piece) => behind[piece].extend(after),
        Part::Sequence(parts) => {
            let mut after = after.clone();
            for part in parts.iter().rev() {
                walk(lowered, part, &after, behind);
                let (pieces, is_nullable) = first(lowered, part);
                if !is_nullable {
                    after.clear();
                }
                after.extend(pieces);
            }
        }
        Part::Or(parts) => parts.iter().for_each(|part| walk(lowered, part, after, behind)),
        Part::Repeat(of, _, most) => {
            let mut after = after.clone();
            if *most != Some(1) {
                after.extend(first(lowered, of).0);
            }
            walk(lowered, of, &after, behind);
        }
    }
}

fn first_chars(piece: &Piece) -> Chars {
    match &piece.kind {
        PieceKind::Text(text) => text.literal.as_ref().map(|text| text.chars().take(1).collect()),
        PieceKind::Json(schema) => Some(first_of_json(schema)),
        PieceKind::Grammar(..) => None,
    }
}

/// By the types of a schema, where it says them.
fn first_of_json(schema: &Value) -> BTreeSet<char> {
    let of_type = |kind: &str| match kind {
        "object" => "{",
        "array" => "[",
        "string" => "\"",
        "integer" | "number" => "-0123456789",
        "boolean" => "tf",
        "null" => "n",
        _ => "{[\"-0123456789tfn",
    };
    match schema.get("type") {
        Some(Value::String(kind)) => of_type(kind).chars().collect(),
        Some(Value::Array(kinds)) => {
            kinds.iter().flat_map(|kind| of_type(kind.as_str().unwrap_or_default()).chars()).collect()
        }
        _ => of_type("").chars().collect(),
    }
}

fn class(chars: &Chars) -> String {
    let Some(chars) = chars else { return "/(?s:.)/".into() };
    let mut class = String::from("/[");
    for &c in chars {
        _ = write!(class, "\\x{{{:x}}}", c as u32);
    }
    class + "]/"
}

/// True if no text at all is this terminal of Lark, with the terminals that it names.
pub(super) fn is_empty(terminals: &str, terminal: &str) -> Result<bool, String> {
    static FACTORY: OnceLock<ParserFactory> = OnceLock::new();
    let factory = match FACTORY.get() {
        Some(factory) => factory,
        None => {
            let made = factory_of_bytes()?;
            FACTORY.get_or_init(|| made)
        }
    };
    let lark = format!("start: EMPTY\nEMPTY: {terminal}\n{terminals}");
    let mut matcher = Matcher::new(factory.create_parser(TopLevelGrammar::from_lark(lark)));
    if let Some(error) = matcher.get_error() {
        return Err(first_line(&error));
    }
    match matcher.compute_mask() {
        Ok(mask) => Ok(mask.as_slice().iter().all(|&word| word == 0)),
        Err(error) if first_line(&error) == StopReason::NoExtensionBias.to_string() => Ok(true),
        Err(error) => Err(first_line(&error)),
    }
}

/// A vocabulary of bytes: what a terminal is does not depend on the model's.
fn factory_of_bytes() -> Result<ParserFactory, String> {
    let mut words: Vec<Vec<u8>> = (0..=255u8).map(|byte| vec![byte]).collect();
    // Never in UTF-8: what marks special tokens is no word.
    words[usize::from(TokTrie::SPECIAL_TOKEN_MARKER)].clear();
    words.push([&[TokTrie::SPECIAL_TOKEN_MARKER], b"end".as_slice()].concat());
    let trie = TokTrie::from(&TokRxInfo::new(257, 256), &words);
    let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &[])
        .map_err(|error| first_line(&error))?;
    factory.quiet();
    *factory.limits_mut() = crate::grammar::vocabulary::parser_limits();
    Ok(factory)
}

/// Each takes some 0.1 ms.
const CHECKS_MAX: usize = 2_000;

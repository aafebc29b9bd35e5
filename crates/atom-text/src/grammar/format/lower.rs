//! From formats to pieces of text, schemas and grammars, and how these follow each other.

use super::check::is_empty;
use super::{Format, FormatKind, Tag, TagCount};
use crate::grammar::ebnf;
use crate::grammar::schema;
use crate::grammar::source::{between_slashes, quote, regex_literal, unanchored, with_options};
use serde_json::Value;
use std::fmt::Write;

/// A format as it is written in Lark.
#[derive(Default)]
pub(super) struct Lowered {
    /// Named regular expressions that others are made of, as lines.
    pub(super) terminals: String,
    pub(super) pieces: Vec<Piece>,
    count: usize,
    pub(super) whole: Part,
}

/// What is read as one.
pub(super) struct Piece {
    pub(super) place: String,
    pub(super) kind: PieceKind,
}

pub(super) enum PieceKind {
    Text(Text),
    Json(Value),
    /// In EBNF, with a text behind it.
    Grammar(String, String),
}

/// A regular expression.
#[derive(Clone)]
pub(super) struct Text {
    /// As one value of a terminal.
    pub(super) value: String,
    /// If it is nothing but this.
    pub(super) literal: Option<String>,
    pub(super) is_nullable: bool,
}

/// How pieces follow each other.
#[derive(Clone)]
pub(super) enum Part {
    Piece(usize),
    Sequence(Vec<Part>),
    Or(Vec<Part>),
    Repeat(Box<Part>, u32, Option<u32>),
}

impl Default for Part {
    fn default() -> Self {
        Self::Sequence(Vec::new())
    }
}

/// What may still be put together with its neighbours, with its place; or what can't.
enum Item {
    Text(String, Text),
    /// With the text behind it, which is read with it.
    Grammar(String, String, String),
    Other(Part),
}

enum Joined {
    /// With the place of the first.
    Text(String, Text),
    Others(Vec<Item>),
}

pub(super) fn lower(format: &Format) -> Result<Lowered, String> {
    let mut lowered = Lowered::default();
    let items = lowered.items(format, &[])?;
    lowered.whole = lowered.sequence(items);
    Ok(lowered)
}

impl Lowered {
    /// A format as neighbours; `ends` are those of the tag that it stands in.
    fn items(&mut self, format: &Format, ends: &[String]) -> Result<Vec<Item>, String> {
        let place = &format.place;
        let text = |text: Text| Ok(vec![Item::Text(place.clone(), text)]);
        match &format.kind {
            FormatKind::ConstString(literal) => text(Text::literal(literal)),
            FormatKind::Regex(regex) => {
                let value = self.terminal(&format!("/{}/", between_slashes(unanchored(regex))));
                let is_nullable = is_empty(&self.terminals, &format!("{value} & \"\""));
                let is_nullable = !is_nullable.map_err(|reason| format!("{place}.pattern: {reason}"))?;
                text(Text { value, literal: None, is_nullable })
            }
            FormatKind::AnyText { excludes, chars_max } => {
                let none: Vec<&String> = excludes.iter().chain(ends).collect();
                let value = self.free(*chars_max, &none);
                text(Text { value, literal: None, is_nullable: true })
            }
            FormatKind::JsonSchema(value) => {
                schema::check(value).map_err(|reason| format!("{place}.json_schema: {reason}"))?;
                let piece = self.piece(place, PieceKind::Json(value.clone()));
                Ok(vec![Item::Other(piece)])
            }
            FormatKind::Grammar(text) => Ok(vec![Item::Grammar(place.clone(), text.clone(), String::new())]),
            FormatKind::Sequence(parts) => {
                let mut items = Vec::new();
                for part in parts {
                    items.extend(self.items(part, ends)?);
                }
                Ok(items)
            }
            FormatKind::Or(parts) => {
                let options = parts.iter().map(|part| self.items(part, ends)).collect::<Result<_, _>>()?;
                Ok(self.or(place, options))
            }
            FormatKind::Repeat { least, most, content } => {
                let items = self.items(content, ends)?;
                Ok(self.repeat(place, items, *least, *most))
            }
            FormatKind::Tag(tag) => self.tag(place, tag, &tag.begin),
            FormatKind::TriggeredTags { triggers, tags, excludes, count } => {
                self.triggered(place, triggers, tags, &[excludes, ends].concat(), *count)
            }
            FormatKind::TagsWithSeparator { tags, separator, count } => {
                self.separated(place, tags, separator, *count)
            }
        }
    }

    /// A tag whose beginning was written up to `begin`.
    fn tag(&mut self, place: &str, tag: &Tag, begin: &str) -> Result<Vec<Item>, String> {
        let mut items = vec![Item::Text(place.to_owned(), Text::literal(begin))];
        items.extend(self.items(&tag.content, &tag.ends)?);
        if let [end] = &tag.ends[..] {
            items.push(Item::Text(place.to_owned(), Text::literal(end)));
        } else {
            let ends: Vec<String> = tag.ends.iter().map(|end| quote(end)).collect();
            let is_nullable = tag.ends.iter().any(String::is_empty);
            let value = self.terminal(&ends.join(" | "));
            items.push(Item::Text(place.to_owned(), Text { value, literal: None, is_nullable }));
        }
        Ok(items)
    }

    fn triggered(
        &mut self,
        place: &str,
        triggers: &[String],
        tags: &[Tag],
        none: &[String],
        count: TagCount,
    ) -> Result<Vec<Item>, String> {
        let mut of_trigger = vec![Vec::new(); triggers.len()];
        for (at, tag) in tags.iter().enumerate() {
            let mut begun = (0..triggers.len()).filter(|&trigger| tag.begin.starts_with(&triggers[trigger]));
            let (Some(trigger), None) = (begun.next(), begun.next()) else {
                return Err(format!(
                    "{place}.tags[{at}].begin is {:?}, which has to begin with exactly one of the {} triggers",
                    tag.begin,
                    triggers.len()
                ));
            };
            of_trigger[trigger].push(at);
        }
        let none: Vec<&String> = none.iter().filter(|none| !none.is_empty()).collect();
        if let Some(trigger) = of_trigger.iter().position(Vec::is_empty) {
            return Err(format!("{place}.triggers[{trigger}]: no tag begins with {:?}", triggers[trigger]));
        }
        if let Some(trigger) = triggers.iter().find(|trigger| none.iter().any(|none| trigger.contains(*none)))
        {
            return Err(format!("{place}: the trigger {trigger:?} holds what may not occur beside it"));
        }
        let inner = |at: usize| format!("{place}.tags[{at}]");
        let mut options = Vec::new();
        for (trigger, tags_of) in triggers.iter().zip(&of_trigger) {
            // Free text ends with the first trigger.
            let until = regex_literal(trigger);
            let others: Vec<String> = triggers.iter().map(|other| regex_literal(other)).collect();
            let mut text = format!("/(?s:.*){until}/ & ~/(?s:.*)({})(?s:.+)/", others.join("|"));
            if !none.is_empty() {
                _ = write!(text, " & {}", without(&none));
            }
            let text = Text { value: self.terminal(&text), literal: None, is_nullable: false };
            let mut rests = Vec::new();
            for &at in tags_of {
                rests.push(self.tag(&inner(at), &tags[at], &tags[at].begin[trigger.len()..])?);
            }
            let mut items = vec![Item::Text(place.to_owned(), text)];
            items.extend(self.or(place, rests));
            options.push(items);
        }
        let first = |this: &mut Self| -> Result<Vec<Item>, String> {
            let tags = tags.iter().enumerate();
            let tags =
                tags.map(|(at, tag)| this.tag(&inner(at), tag, &tag.begin)).collect::<Result<_, _>>()?;
            Ok(this.or(place, tags))
        };
        let without: Vec<&String> = triggers.iter().chain(none).collect();
        let rest = Text { value: self.free(None, &without), literal: None, is_nullable: true };
        let rest = Item::Text(place.to_owned(), rest);
        match (count.at_least_one, count.stop_after_first) {
            (true, true) => first(self),
            (false, true) => {
                options.push(vec![rest]);
                Ok(self.or(place, options))
            }
            (at_least_one, false) => {
                let mut items = if at_least_one { first(self)? } else { Vec::new() };
                let again = self.or(place, options);
                items.extend(self.repeat(place, again, 0, None));
                items.push(rest);
                Ok(items)
            }
        }
    }

    fn separated(
        &mut self,
        place: &str,
        tags: &[Tag],
        separator: &str,
        count: TagCount,
    ) -> Result<Vec<Item>, String> {
        let one = |this: &mut Self| -> Result<Vec<Item>, String> {
            let tags = tags.iter().enumerate();
            let tags = tags.map(|(at, tag)| this.tag(&format!("{place}.tags[{at}]"), tag, &tag.begin));
            let tags = tags.collect::<Result<_, _>>()?;
            Ok(this.or(place, tags))
        };
        let mut items = one(self)?;
        if !count.stop_after_first {
            let mut again = vec![Item::Text(place.to_owned(), Text::literal(separator))];
            again.extend(one(self)?);
            items.extend(self.repeat(place, again, 0, None));
        }
        Ok(if count.at_least_one { items } else { self.repeat(place, items, 0, Some(1)) })
    }

    fn or(&mut self, place: &str, options: Vec<Vec<Item>>) -> Vec<Item> {
        let (mut texts, mut places, mut others, mut is_nullable) =
            (Vec::new(), Vec::new(), Vec::new(), false);
        for option in options {
            match self.joined(option) {
                Joined::Text(place, text) => {
                    is_nullable |= text.is_nullable;
                    places.push(place);
                    texts.push(text);
                }
                Joined::Others(items) => others.push(self.sequence(items)),
            }
        }
        // One of several has a place of its own.
        let place = if let [only] = &places[..] { only } else { place };
        let text = match (&texts[..], texts.len()) {
            (_, 0) => None,
            ([only], _) => Some(only.clone()),
            _ => {
                let values: Vec<&str> = texts.iter().map(|text| text.value.as_str()).collect();
                Some(Text { value: self.terminal(&values.join(" | ")), literal: None, is_nullable })
            }
        };
        if others.is_empty() {
            return text.map(|text| Item::Text(place.to_owned(), text)).into_iter().collect();
        }
        others.extend(text.map(|text| self.piece(place, PieceKind::Text(text))));
        vec![Item::Other(Part::Or(others))]
    }

    fn repeat(&mut self, place: &str, items: Vec<Item>, least: u32, most: Option<u32>) -> Vec<Item> {
        if most == Some(0) {
            return Vec::new();
        }
        match self.joined(items) {
            Joined::Text(_, text) => {
                let value = self.terminal(&repeated(&text.value, least, most));
                let is_nullable = text.is_nullable || least == 0;
                vec![Item::Text(place.to_owned(), Text { value, literal: None, is_nullable })]
            }
            Joined::Others(items) => {
                let part = self.sequence(items);
                vec![Item::Other(Part::Repeat(Box::new(part), least, most))]
            }
        }
    }

    /// Neighbouring texts put together.
    fn joined(&mut self, items: Vec<Item>) -> Joined {
        let mut joined: Vec<Item> = Vec::new();
        for item in items {
            let item = match (joined.last_mut(), item) {
                (Some(Item::Text(_, before)), Item::Text(_, text)) => {
                    *before = self.behind(before, &text);
                    continue;
                }
                (Some(Item::Grammar(_, _, ending)), Item::Text(_, Text { literal: Some(literal), .. })) => {
                    ending.push_str(&literal);
                    continue;
                }
                (_, item) => item,
            };
            joined.push(item);
        }
        if joined.is_empty() {
            joined.push(Item::Text(String::new(), Text::literal("")));
        }
        match &joined[..] {
            [Item::Text(place, text)] => Joined::Text(place.clone(), text.clone()),
            _ => Joined::Others(joined),
        }
    }

    fn behind(&mut self, before: &Text, text: &Text) -> Text {
        if let (Some(before), Some(literal)) = (&before.literal, &text.literal) {
            return Text::literal(&(before.clone() + literal));
        }
        let value = match (before.literal.as_deref(), text.literal.as_deref()) {
            (Some(""), _) => return text.clone(),
            (_, Some("")) => return before.clone(),
            _ => self.terminal(&format!("{} {}", before.value, text.value)),
        };
        Text { value, literal: None, is_nullable: before.is_nullable && text.is_nullable }
    }

    fn sequence(&mut self, items: Vec<Item>) -> Part {
        let items = match self.joined(items) {
            Joined::Text(place, text) => vec![Item::Text(place, text)],
            Joined::Others(items) => items,
        };
        let mut parts = Vec::with_capacity(items.len());
        for item in items {
            match item {
                Item::Text(_, Text { literal: Some(literal), .. }) if literal.is_empty() => {}
                Item::Text(place, text) => parts.push(self.piece(&place, PieceKind::Text(text))),
                Item::Grammar(place, text, ending) => {
                    parts.push(self.piece(&place, PieceKind::Grammar(text, ending)));
                }
                Item::Other(part) => parts.push(part),
            }
        }
        Part::Sequence(parts)
    }

    fn piece(&mut self, place: &str, kind: PieceKind) -> Part {
        self.pieces.push(Piece { place: place.to_owned(), kind });
        Part::Piece(self.pieces.len() - 1)
    }

    /// Any text in which none of these occurs.
    fn free(&mut self, chars_max: Option<u32>, none: &[&String]) -> String {
        let mut text = match chars_max {
            None => "/(?s:.*)/".to_owned(),
            Some(most) => format!("/(?s:.{{0,{most}}})/"),
        };
        let none: Vec<&String> = none.iter().copied().filter(|none| !none.is_empty()).collect();
        if !none.is_empty() {
            _ = write!(text, " & {}", without(&none));
        }
        self.terminal(&text)
    }

    /// A name for a regular expression.
    fn terminal(&mut self, text: &str) -> String {
        self.count += 1;
        let name = format!("F{}", self.count);
        _ = writeln!(self.terminals, "{name}: {text}");
        name
    }

    /// All of it in Lark.
    pub(super) fn lark(&self) -> Result<String, String> {
        let mut lark = String::new();
        let mut count = 0;
        let whole = self.rule(&self.whole, &mut lark, &mut count)?;
        Ok(format!("start: {whole}\n{lark}{}", self.terminals))
    }

    fn rule(&self, part: &Part, lark: &mut String, count: &mut usize) -> Result<String, String> {
        let body = match part {
            &Part::Piece(piece) => match &self.pieces[piece].kind {
                PieceKind::Text(text) => return Ok(text.value.clone()),
                PieceKind::Json(value) => format!("%json {}", with_options(value)),
                PieceKind::Grammar(text, ending) => {
                    let place = &self.pieces[piece].place;
                    let inner =
                        ebnf::to_lark(text, ending).map_err(|reason| format!("{place}.grammar: {reason}"))?;
                    format!("%lark {{\n{inner}}}")
                }
            },
            Part::Sequence(parts) if parts.is_empty() => quote(""),
            Part::Sequence(parts) => self.rules(parts, lark, count)?.join(" "),
            Part::Or(parts) => self.rules(parts, lark, count)?.join(" | "),
            Part::Repeat(of, least, most) => repeated(&self.rule(of, lark, count)?, *least, *most),
        };
        *count += 1;
        let name = format!("f{count}");
        _ = writeln!(lark, "{name}: {body}");
        Ok(name)
    }

    fn rules(&self, parts: &[Part], lark: &mut String, count: &mut usize) -> Result<Vec<String>, String> {
        parts.iter().map(|part| self.rule(part, lark, count)).collect()
    }
}

impl Text {
    fn literal(text: &str) -> Self {
        Self { value: quote(text), literal: Some(text.to_owned()), is_nullable: text.is_empty() }
    }
}

/// A regular expression of all texts in which none of these occurs.
fn without(none: &[&String]) -> String {
    let none: Vec<String> = none.iter().map(|none| regex_literal(none)).collect();
    format!("~/(?s:.*)({})(?s:.*)/", none.join("|"))
}

fn repeated(of: &str, least: u32, most: Option<u32>) -> String {
    match (least, most) {
        (0, None) => format!("{of}*"),
        (least, None) => format!("{of}{{{least},}}"),
        (least, Some(most)) => format!("{of}{{{least},{most}}}"),
    }
}

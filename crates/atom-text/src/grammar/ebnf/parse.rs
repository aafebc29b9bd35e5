//! From text to rules.

use super::{Ebnf, Node, Rule};
use std::collections::HashMap;

/// Reads a grammar. Names of rules may come before their definitions.
pub(super) fn parse(text: &str) -> Result<Ebnf, String> {
    let mut reader = Reader {
        text,
        at: 0,
        line: 1,
        depth: 0,
        ebnf: Ebnf { nodes: Vec::new(), rules: Vec::new(), root: 0 },
        rules: HashMap::new(),
        met: Vec::new(),
    };
    reader.grammar()?;
    Ok(reader.ebnf)
}

/// What names consist of.
pub(super) fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.')
}

fn begins_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// The name at the beginning of a text, or nothing.
fn name_of(text: &str) -> &str {
    let end = text.find(|c| !is_of_name(c)).unwrap_or(text.len());
    if text.starts_with(begins_name) { &text[..end] } else { "" }
}

struct Reader<'a> {
    text: &'a str,
    /// A byte of the text.
    at: usize,
    line: usize,
    /// Of groups.
    depth: usize,
    ebnf: Ebnf,
    rules: HashMap<&'a str, usize>,
    /// For each rule, the line that named it first, and whether it was defined.
    met: Vec<(usize, bool)>,
}

impl<'a> Reader<'a> {
    fn grammar(&mut self) -> Result<(), String> {
        self.blank();
        while self.at < self.text.len() {
            self.rule()?;
        }
        if let Some(rule) = self.met.iter().position(|(_, is_defined)| !is_defined) {
            let (name, line) = (&self.ebnf.rules[rule].name, self.met[rule].0);
            return Err(format!("line {line}: there is no rule {name:?}{}", hint_of(name)));
        }
        self.ends()?;
        self.ebnf.root =
            *self.rules.get(ROOT).ok_or_else(|| format!("there is no rule {ROOT:?}, where it starts"))?;
        Ok(())
    }

    /// Refuses a rule that no finite text follows: a model would write until its tokens are used up.
    fn ends(&self) -> Result<(), String> {
        let rules = &self.ebnf.rules;
        let (mut ends, mut is_changed) = (vec![false; rules.len()], true);
        while std::mem::take(&mut is_changed) {
            // What is named comes behind, mostly.
            for rule in (0..rules.len()).rev() {
                let now = ends[rule] || self.ebnf.ends(rules[rule].body, &ends);
                is_changed |= now != std::mem::replace(&mut ends[rule], now);
            }
        }
        let endless = ends.iter().position(|ends| !ends);
        endless.map_or(Ok(()), |rule| {
            let (line, name) = (self.met[rule].0, &rules[rule].name);
            Err(format!("line {line}: no finite text follows the rule {name:?}: it refers back to itself"))
        })
    }

    fn rule(&mut self) -> Result<(), String> {
        let Some(name) = self.definition() else {
            return Err(self.wrong("a rule, 'name ::= ..', has to begin here"));
        };
        if !self.is_first_of_line() {
            return Err(self.wrong(&format!("the rule {name:?} has to begin on a line of its own")));
        }
        let line = self.line;
        self.skip(name.len());
        self.blank();
        if self.peek() == Some('[') {
            return Err(self.wrong(&format!("options of a rule ({name:?}) are not taken")));
        }
        self.skip("::=".len());
        self.blank();
        let rule = self.named(name);
        if std::mem::replace(&mut self.met[rule].1, true) {
            return Err(format!("line {line}: the rule {name:?} is defined twice"));
        }
        self.ebnf.rules[rule].body = self.choice()?;
        Ok(())
    }

    fn choice(&mut self) -> Result<usize, String> {
        let mut options = vec![self.sequence()?];
        while self.peek() == Some('|') {
            self.skip(1);
            self.blank();
            options.push(self.sequence()?);
        }
        Ok(if let [only] = options[..] { only } else { self.ebnf.add(Node::Choice(options)) })
    }

    fn sequence(&mut self) -> Result<usize, String> {
        let mut parts = Vec::new();
        while let Some(c) = self.peek() {
            if matches!(c, '|' | ')') || self.definition().is_some() {
                break;
            }
            let part = self.element(c)?;
            parts.push(self.repeated(part)?);
        }
        Ok(if let [only] = parts[..] { only } else { self.ebnf.add(Node::Sequence(parts)) })
    }

    fn element(&mut self, c: char) -> Result<usize, String> {
        let node = match c {
            '"' => Node::Text(self.literal()?),
            '[' => Node::Chars(self.class()?),
            '.' => {
                self.skip(1);
                Node::Chars(vec![('\0', char::MAX)])
            }
            '(' => {
                self.skip(1);
                if matches!(self.peek(), Some('=' | '?')) {
                    return Err(self.wrong("lookahead is not taken"));
                }
                self.blank();
                self.depth += 1;
                if self.depth > DEPTH_MAX {
                    return Err(self.wrong(&format!("groups are nested more than {DEPTH_MAX} deep")));
                }
                let inner = self.choice()?;
                self.depth -= 1;
                if self.peek() != Some(')') {
                    return Err(self.wrong("a ')' is missing before this"));
                }
                self.skip(1);
                return Ok(inner);
            }
            '<' | '!' => return Err(self.wrong("tokens can't be named; a grammar is of text")),
            '*' | '+' | '?' | '{' => {
                return Err(self.wrong(&format!("there is nothing before {c:?} to repeat")));
            }
            '\'' => return Err(self.wrong("texts stand in double quotes")),
            _ if begins_name(c) => {
                let name = name_of(self.rest());
                let rule = self.named(name);
                self.skip(name.len());
                if MACROS.contains(&name) && self.peek() == Some('(') {
                    return Err(self.wrong(&format!("{name}(..) is not taken; a grammar is of text")));
                }
                Node::Rule(rule)
            }
            _ => return Err(self.wrong(&format!("{c:?} begins nothing that a rule consists of"))),
        };
        Ok(self.ebnf.add(node))
    }

    /// What stands before, with how often it may come.
    fn repeated(&mut self, of: usize) -> Result<usize, String> {
        // Blanks may stand before, too.
        self.blank();
        let (least, most) = match self.peek() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            Some('{') => self.count()?,
            _ => return Ok(of),
        };
        // The sign, or the closing brace.
        self.skip(1);
        self.blank();
        if let Some(c @ ('*' | '+' | '?' | '{')) = self.peek() {
            return Err(self.wrong(&format!("{c:?} behind another repetition: put that into parentheses")));
        }
        Ok(self.ebnf.add(Node::Repeat { of, least, most }))
    }

    /// `{2}`, `{2,}` or `{2,4}`, up to the closing brace.
    fn count(&mut self) -> Result<(u32, Option<u32>), String> {
        self.skip(1);
        let rest = self.rest();
        let inner = rest.split('}').next().filter(|inner| inner.len() < rest.len()).unwrap_or_default();
        let number = |text: &str| text.trim().parse::<u32>().ok().filter(|&number| number <= COUNT_MAX);
        let count = match inner.split_once(',') {
            None => number(inner).map(|exact| (exact, Some(exact))),
            Some((least, "")) => number(least).map(|least| (least, None)),
            Some((least, most)) => number(least).zip(number(most)).map(|(least, most)| (least, Some(most))),
        };
        let count = count.filter(|&(least, most)| most.is_none_or(|most| least <= most));
        let shown: String = inner.chars().take(SHOWN_CHARS_MAX).collect();
        let count = count.ok_or_else(|| {
            self.wrong(&format!(
                "{{{shown}}} is none of {{m}}, {{m,}} and {{m,n}} with m <= n <= {COUNT_MAX}"
            ))
        })?;
        self.skip(inner.len());
        Ok(count)
    }

    fn literal(&mut self) -> Result<String, String> {
        self.skip(1);
        let mut text = String::new();
        loop {
            match self.peek() {
                None | Some('\n' | '\r') => return Err(self.wrong("a text has no closing '\"' on its line")),
                Some('"') => break,
                Some('\\') => text.push(self.escape()?),
                Some(c) => {
                    text.push(c);
                    self.skip(c.len_utf8());
                }
            }
        }
        self.skip(1);
        Ok(text)
    }

    fn class(&mut self) -> Result<Vec<(char, char)>, String> {
        self.skip(1);
        let is_negated = self.peek() == Some('^');
        if is_negated {
            self.skip(1);
        }
        let mut ranges = Vec::new();
        while self.peek() != Some(']') {
            let first = self.of_class()?;
            let is_range = self.rest().starts_with('-') && !self.rest().starts_with("-]");
            let last = if is_range {
                self.skip(1);
                self.of_class()?
            } else {
                first
            };
            if last < first {
                return Err(
                    self.wrong(&format!("the range {first:?} to {last:?} of a class is the wrong way round"))
                );
            }
            ranges.push((first, last));
        }
        let ranges = if is_negated { others(ranges) } else { in_order(ranges) };
        if ranges.is_empty() {
            return Err(self.wrong("no character is in this class"));
        }
        self.skip(1);
        Ok(ranges)
    }

    fn of_class(&mut self) -> Result<char, String> {
        match self.peek() {
            None | Some('\n' | '\r') => {
                Err(self.wrong("a class of characters has no closing ']' on its line"))
            }
            Some('\\') => self.escape(),
            Some(c) => {
                self.skip(c.len_utf8());
                Ok(c)
            }
        }
    }

    fn escape(&mut self) -> Result<char, String> {
        self.skip(1);
        let Some(c) = self.peek() else { return Err(self.wrong("a backslash is the last of it")) };
        self.skip(c.len_utf8());
        Ok(match c {
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'b' => '\u{8}',
            'f' => '\u{c}',
            'a' => '\u{7}',
            'v' => '\u{b}',
            'e' => '\u{1b}',
            '0' => '\0',
            'x' => return self.code("\\x", 2),
            'u' => return self.code("\\u", 4),
            'U' => return self.code("\\U", 8),
            _ if c.is_ascii_punctuation() => c,
            _ => return Err(self.wrong(&format!("'\\{c}' is no escape"))),
        })
    }

    fn code(&mut self, escape: &str, digits: usize) -> Result<char, String> {
        let rest = self.rest();
        let end = rest.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(rest.len());
        if end < digits {
            return Err(
                self.wrong(&format!("'{escape}' needs {digits} hexadecimal digits, and {end} follow"))
            );
        }
        // llama.cpp takes two, xgrammar all of them.
        if escape == "\\x" && end > digits {
            let read = &rest[..end.min(SHOWN_CHARS_MAX)];
            return Err(
                self.wrong(&format!("'\\x{read}' is read in different ways: write '\\u' and four digits"))
            );
        }
        let code = u32::from_str_radix(&rest[..digits], 16).ok().and_then(char::from_u32);
        let code =
            code.ok_or_else(|| self.wrong(&format!("'{escape}{}' is no character", &rest[..digits])))?;
        self.skip(digits);
        Ok(code)
    }

    /// The name of the rule whose definition begins here.
    fn definition(&self) -> Option<&'a str> {
        let rest = self.rest();
        let name = name_of(rest);
        let behind = rest[name.len()..].trim_start();
        let behind = match behind.strip_prefix('[').and_then(|options| options.split_once(']')) {
            Some((options, behind)) if options.contains('=') => behind.trim_start(),
            _ => behind,
        };
        (!name.is_empty() && behind.starts_with("::=")).then_some(name)
    }

    fn is_first_of_line(&self) -> bool {
        self.text[..self.at].rsplit('\n').next().is_none_or(|before| before.trim().is_empty())
    }

    fn named(&mut self, name: &'a str) -> usize {
        if let Some(&rule) = self.rules.get(name) {
            return rule;
        }
        let rule = self.ebnf.rules.len();
        self.ebnf.rules.push(Rule { name: name.to_owned(), body: 0 });
        self.met.push((self.line, false));
        self.rules.insert(name, rule);
        rule
    }

    /// White space and comments.
    fn blank(&mut self) {
        loop {
            let rest = self.rest();
            let blank = rest.len() - rest.trim_start().len();
            self.skip(blank);
            if self.peek() != Some('#') {
                return;
            }
            self.skip(self.rest().find('\n').unwrap_or(self.rest().len()));
        }
    }

    fn skip(&mut self, bytes: usize) {
        self.line += self.text[self.at..self.at + bytes].matches('\n').count();
        self.at += bytes;
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn wrong(&self, what: &str) -> String {
        format!("line {}: {what}", self.line)
    }
}

fn hint_of(name: &str) -> &'static str {
    if MACROS.contains(&name) { ", and its macro is not taken: a grammar is of text" } else { "" }
}

fn in_order(mut ranges: Vec<(char, char)>) -> Vec<(char, char)> {
    ranges.sort_unstable();
    let mut apart: Vec<(char, char)> = Vec::with_capacity(ranges.len());
    for (first, last) in ranges {
        match apart.last_mut() {
            Some((_, end)) if first <= *end || after(*end) == Some(first) => *end = last.max(*end),
            _ => apart.push((first, last)),
        }
    }
    apart
}

fn others(ranges: Vec<(char, char)>) -> Vec<(char, char)> {
    let mut others = Vec::new();
    let mut next = Some('\0');
    for (first, last) in in_order(ranges) {
        if let (Some(from), Some(to)) = (next, before(first))
            && from <= to
        {
            others.push((from, to));
        }
        next = after(last);
    }
    others.extend(next.map(|from| (from, char::MAX)));
    others
}

/// The next character: surrogates are none.
fn after(c: char) -> Option<char> {
    (c..=char::MAX).nth(1)
}

fn before(c: char) -> Option<char> {
    ('\0'..=c).rev().nth(1)
}

/// Where a grammar starts.
const ROOT: &str = "root";

/// Groups within groups. Lark takes 30 of them.
const DEPTH_MAX: usize = 24;

/// Repetitions; what is built of them is bounded again.
const COUNT_MAX: u32 = 100_000;

/// Of xgrammar.
const MACROS: [&str; 5] = ["TagDispatch", "TokenTagDispatch", "Token", "ExcludeToken", "AnyTokens"];

const SHOWN_CHARS_MAX: usize = 20;

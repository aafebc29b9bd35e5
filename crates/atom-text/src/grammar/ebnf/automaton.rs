//! Terminals as an automaton, and where the lexer would read on in one past the end of another.
//!
//! Bytes stand for the characters that begin with them, and all terminals are compared with all others: some are taken
//! apart without need, which costs speed only.

use super::lexemes::{Part, Plan, TOO_LARGE};
use super::{Ebnf, Node};
use std::collections::{HashMap, HashSet};

/// Bytes.
#[derive(Clone, Copy, Default, PartialEq)]
struct Bytes([u64; 4]);

impl Bytes {
    /// With which the characters begin.
    fn of(ranges: &[(char, char)]) -> Self {
        let mut bytes = Self::default();
        for &(first, last) in ranges {
            let byte = |c: char| c.encode_utf8(&mut [0; 4]).as_bytes()[0];
            for byte in byte(first)..=byte(last) {
                bytes.0[usize::from(byte) / 64] |= 1 << (byte % 64);
            }
        }
        bytes
    }

    fn join(&mut self, other: Self) {
        self.0.iter_mut().zip(other.0).for_each(|(mine, theirs)| *mine |= theirs);
    }

    fn meets(&self, other: &Self) -> bool {
        self.0.iter().zip(other.0).any(|(mine, theirs)| mine & theirs != 0)
    }
}

/// All terminals as one automaton of positions (Glushkov's): each is a character that is read there.
#[derive(Default)]
pub(super) struct Lexer {
    bytes: Vec<Bytes>,      // [positions]
    next: Vec<Vec<usize>>,  // [positions]
    ends: Vec<bool>,        // [positions]
    lexeme: Vec<usize>,     // [positions]
    first: Vec<Vec<usize>>, // [lexemes]
    is_nullable: Vec<bool>, // [lexemes]
    edges: usize,
    /// Nodes that were looked at: what several name is looked at for each of them, though nothing be in it.
    visits: usize,
}

/// Of a part of a terminal: where it may begin and end, and whether it may be nothing.
#[derive(Clone, Default)]
struct Ends {
    first: Vec<usize>,
    last: Vec<usize>,
    is_nullable: bool,
}

impl Lexer {
    pub(super) fn of(ebnf: &Ebnf, plan: &Plan) -> Result<Self, String> {
        let mut lexer = Self::default();
        for (lexeme, &node) in plan.lexemes.iter().enumerate() {
            let ends = lexer.add(ebnf, lexeme, node)?;
            ends.last.iter().for_each(|&last| lexer.ends[last] = true);
            lexer.first.push(ends.first);
            lexer.is_nullable.push(ends.is_nullable);
        }
        Ok(lexer)
    }

    fn position(&mut self, lexeme: usize, ranges: &[(char, char)]) -> Result<Ends, String> {
        let at = self.bytes.len();
        if at == POSITIONS_MAX {
            return Err(TOO_LARGE.into());
        }
        self.bytes.push(Bytes::of(ranges));
        self.next.push(Vec::new());
        self.ends.push(false);
        self.lexeme.push(lexeme);
        Ok(Ends { first: vec![at], last: vec![at], is_nullable: false })
    }

    fn add(&mut self, ebnf: &Ebnf, lexeme: usize, node: usize) -> Result<Ends, String> {
        self.visits += 1;
        if self.visits > VISITS_MAX {
            return Err(TOO_LARGE.into());
        }
        let nothing = Ends { is_nullable: true, ..Ends::default() };
        match &ebnf.nodes[node] {
            Node::Chars(ranges) => self.position(lexeme, ranges),
            Node::Text(text) => text.chars().try_fold(nothing, |before, c| {
                let c = self.position(lexeme, &[(c, c)])?;
                self.join(before, c)
            }),
            &Node::Rule(rule) => self.add(ebnf, lexeme, ebnf.rules[rule].body),
            Node::Sequence(parts) => parts.iter().try_fold(nothing, |before, &part| {
                let part = self.add(ebnf, lexeme, part)?;
                self.join(before, part)
            }),
            Node::Choice(parts) => parts.iter().try_fold(Ends::default(), |mut all, &part| {
                let part = self.add(ebnf, lexeme, part)?;
                all.first.extend(part.first);
                all.last.extend(part.last);
                all.is_nullable |= part.is_nullable;
                Ok(all)
            }),
            Node::Repeat { most: Some(0), .. } => Ok(nothing),
            &Node::Repeat { of, least, most } => {
                let mut of = self.add(ebnf, lexeme, of)?;
                if most != Some(1) {
                    self.connect(&of.last, &of.first)?;
                }
                of.is_nullable |= least == 0;
                Ok(of)
            }
        }
    }

    /// One behind the other.
    fn join(&mut self, before: Ends, mut behind: Ends) -> Result<Ends, String> {
        self.connect(&before.last, &behind.first)?;
        let mut first = before.first;
        if before.is_nullable {
            first.extend(&behind.first);
        }
        if behind.is_nullable {
            behind.last.extend(before.last);
        }
        Ok(Ends { first, last: behind.last, is_nullable: before.is_nullable && behind.is_nullable })
    }

    fn connect(&mut self, last: &[usize], first: &[usize]) -> Result<(), String> {
        self.edges += last.len() * first.len();
        if self.edges > EDGES_MAX {
            return Err(TOO_LARGE.into());
        }
        last.iter().for_each(|&at| self.next[at].extend(first));
        Ok(())
    }

    /// The terminals that the lexer could read on in, past the end of another.
    pub(super) fn conflicts(
        &self,
        ebnf: &Ebnf,
        plan: &Plan,
        work: &mut usize,
    ) -> Result<HashSet<usize>, String> {
        let behind = Behind::of(self, plan, ebnf.root).lexemes;
        // Two positions that the same bytes may lead to, from the same beginning.
        let starts: Vec<usize> = self.first.iter().flatten().copied().collect();
        let mut met = HashSet::new();
        let mut open = Vec::new();
        let mut meet = |one: usize, other: usize, open: &mut Vec<(usize, usize)>| {
            if self.bytes[one].meets(&self.bytes[other]) && met.insert((one, other)) {
                open.push((one, other));
            }
            *work += 1;
            if *work > WORK_MAX || met.len() > PAIRS_MAX { Err(TOO_LARGE.to_owned()) } else { Ok(()) }
        };
        for &one in &starts {
            for &other in &starts {
                meet(one, other, &mut open)?;
            }
        }
        let mut conflicts = HashSet::new();
        while let Some((one, other)) = open.pop() {
            let follows = &behind[self.lexeme[one]];
            if self.ends[one] && self.next[other].iter().any(|&next| self.bytes[next].meets(follows)) {
                conflicts.insert(self.lexeme[other]);
            }
            for &one in &self.next[one] {
                for &other in &self.next[other] {
                    meet(one, other, &mut open)?;
                }
            }
        }
        Ok(conflicts)
    }
}

/// The bytes that may come behind.
struct Behind<'a> {
    lexer: &'a Lexer,
    /// What rules begin with, and whether they may be nothing.
    first: HashMap<usize, (Bytes, bool)>,
    rules: HashMap<usize, Bytes>,
    lexemes: Vec<Bytes>,
    is_changed: bool,
}

impl<'a> Behind<'a> {
    fn of(lexer: &'a Lexer, plan: &Plan, root: usize) -> Self {
        let lexemes = vec![Bytes::default(); plan.lexemes.len()];
        let (first, rules) = (HashMap::new(), HashMap::from([(root, Bytes::default())]));
        let mut behind = Self { lexer, first, rules, lexemes, is_changed: true };
        while std::mem::take(&mut behind.is_changed) {
            for (rule, part) in plan.rules.iter().rev() {
                let first = behind.first(part);
                behind.is_changed |= behind.first.insert(*rule, first) != Some(first);
            }
        }
        behind.is_changed = true;
        while std::mem::take(&mut behind.is_changed) {
            for (rule, part) in &plan.rules {
                let after = behind.rules.get(rule).copied().unwrap_or_default();
                behind.walk(part, after);
            }
        }
        behind
    }

    fn first(&self, part: &Part) -> (Bytes, bool) {
        match part {
            &Part::Lexeme(lexeme) => {
                let mut bytes = Bytes::default();
                self.lexer.first[lexeme].iter().for_each(|&at| bytes.join(self.lexer.bytes[at]));
                (bytes, self.lexer.is_nullable[lexeme])
            }
            Part::Rule(rule) => self.first.get(rule).copied().unwrap_or_default(),
            Part::Sequence(parts) => {
                let mut bytes = Bytes::default();
                for part in parts {
                    let (first, is_nullable) = self.first(part);
                    bytes.join(first);
                    if !is_nullable {
                        return (bytes, false);
                    }
                }
                (bytes, true)
            }
            Part::Choice(parts) => parts.iter().fold(Default::default(), |(mut bytes, nullable), part| {
                let (first, is_nullable) = self.first(part);
                bytes.join(first);
                (bytes, nullable || is_nullable)
            }),
            Part::Repeat(of, least, _) => {
                let (bytes, is_nullable) = self.first(of);
                (bytes, is_nullable || *least == 0)
            }
        }
    }

    fn walk(&mut self, part: &Part, mut after: Bytes) {
        match part {
            &Part::Lexeme(lexeme) => self.is_changed |= grow(&mut self.lexemes[lexeme], after),
            Part::Rule(rule) => self.is_changed |= grow(self.rules.entry(*rule).or_default(), after),
            Part::Sequence(parts) => {
                for part in parts.iter().rev() {
                    self.walk(part, after);
                    let (first, is_nullable) = self.first(part);
                    after = if is_nullable { after } else { Bytes::default() };
                    after.join(first);
                }
            }
            Part::Choice(parts) => parts.iter().for_each(|part| self.walk(part, after)),
            Part::Repeat(of, _, most) => {
                if *most != Some(1) {
                    after.join(self.first(of).0);
                }
                self.walk(of, after);
            }
        }
    }
}

/// True if that made it more.
fn grow(bytes: &mut Bytes, by: Bytes) -> bool {
    let before = *bytes;
    bytes.join(by);
    *bytes != before
}

/// Characters of all terminals, with rules that several name counted for each of them.
const POSITIONS_MAX: usize = 20_000;

/// Nodes, counted so.
const VISITS_MAX: usize = 1_000_000;

/// Pairs of characters that one may follow the other.
const EDGES_MAX: usize = 1_000_000;

/// Pairs of characters that the same beginning may lead to: some tens of megabytes.
const PAIRS_MAX: usize = 1_000_000;

/// Pairs that are looked at, on all levels together: some tenths of a second.
const WORK_MAX: usize = 100_000_000;

//! Which parts of a grammar are terminals of Lark.
//!
//! Its lexer reads a terminal as long as any that may stand there goes on, and then is bound to the longest. What is
//! one terminal here has to be found so: where a terminal ends within another that goes on, the byte that goes on must
//! not be one that may come behind the first. Where it may, the second is taken apart by one level, and all is looked
//! at again. Single characters never go on, so that ends.

use super::automaton::Lexer;
use super::{Ebnf, Node};
use std::collections::{HashMap, HashSet, VecDeque};

/// How a grammar is written in Lark.
pub(super) struct Plan {
    /// Rules that stay such, and what they are; mostly behind those that name them.
    pub(super) rules: Vec<(usize, Part)>,
    /// Terminals: nodes that no recursion is in.
    pub(super) lexemes: Vec<usize>,
}

pub(super) enum Part {
    /// A terminal, by its place in the plan.
    Lexeme(usize),
    Rule(usize),
    Sequence(Vec<Part>),
    Choice(Vec<Part>),
    Repeat(Box<Part>, u32, Option<u32>),
}

/// Plans a grammar, within bounds on the work for it.
pub(super) fn plan(ebnf: &mut Ebnf) -> Result<Plan, String> {
    unroll(ebnf);
    let mut planner =
        Planner { is_regular: regular(ebnf), ebnf, split: HashSet::new(), made: HashMap::new() };
    let mut work = 0;
    for _ in 0..ROUNDS_MAX {
        let (plan, owners) = planner.round();
        let root = &planner.ebnf.rules[planner.ebnf.root];
        if plan.lexemes == [root.body] {
            // One terminal, with nothing behind it.
            return Ok(plan);
        }
        let conflicts = Lexer::of(planner.ebnf, &plan)?.conflicts(planner.ebnf, &plan, &mut work)?;
        if conflicts.is_empty() {
            return Ok(plan);
        }
        planner.split.extend(conflicts.into_iter().map(|lexeme| owners[lexeme]));
    }
    Err(TOO_LARGE.into())
}

/// `a ::= x a | y` is `x* y`, and `a ::= a x | y` is `y x*`: what a terminal can be.
fn unroll(ebnf: &mut Ebnf) {
    for rule in 0..ebnf.rules.len() {
        let mut options = Vec::new();
        flatten(ebnf, ebnf.rules[rule].body, &mut options);
        for at_end in [true, false] {
            if let Some(body) = unrolled(ebnf, rule, &options, at_end) {
                ebnf.rules[rule].body = body;
                break;
            }
        }
    }
}

/// The options of a rule, as sequences.
fn flatten(ebnf: &Ebnf, node: usize, options: &mut Vec<Vec<usize>>) {
    match &ebnf.nodes[node] {
        Node::Choice(parts) => parts.iter().for_each(|&part| flatten(ebnf, part, options)),
        &Node::Repeat { of, least: 0, most: Some(1) } => {
            flatten(ebnf, of, options);
            options.push(Vec::new());
        }
        Node::Sequence(parts) => options.push(parts.clone()),
        _ => options.push(vec![node]),
    }
}

fn unrolled(ebnf: &mut Ebnf, rule: usize, options: &[Vec<usize>], at_end: bool) -> Option<usize> {
    let (mut again, mut once) = (Vec::new(), Vec::new());
    for option in options {
        let end = if at_end { option.last() } else { option.first() };
        let is_again = end.is_some_and(|&end| ebnf.nodes[end] == Node::Rule(rule));
        let rest = match (is_again, at_end) {
            (false, _) => &option[..],
            (true, true) => &option[..option.len() - 1],
            (true, false) => &option[1..],
        };
        let mut names = Vec::new();
        rest.iter().for_each(|&part| ebnf.names(part, &mut names));
        if names.contains(&rule) {
            return None;
        }
        if is_again { &mut again } else { &mut once }.push(rest.to_vec());
    }
    if again.is_empty() || once.is_empty() {
        return None;
    }
    let mut choice = |options: Vec<Vec<usize>>| {
        let options = options.into_iter().map(|option| ebnf.add(Node::Sequence(option))).collect();
        ebnf.add(Node::Choice(options))
    };
    let (again, once) = (choice(again), choice(once));
    let again = ebnf.add(Node::Repeat { of: again, least: 0, most: None });
    let parts = if at_end { vec![again, once] } else { vec![once, again] };
    Some(ebnf.add(Node::Sequence(parts)))
}

/// For each rule, whether no recursion is in it.
fn regular(ebnf: &Ebnf) -> Vec<bool> {
    let count = ebnf.rules.len();
    let (mut named_by, mut open) = (vec![Vec::new(); count], vec![0usize; count]);
    for (rule, open) in open.iter_mut().enumerate() {
        let mut names = Vec::new();
        ebnf.names(ebnf.rules[rule].body, &mut names);
        *open = names.len();
        names.into_iter().for_each(|name| named_by[name].push(rule));
    }
    let mut is_regular = vec![false; count];
    let mut next: Vec<usize> = (0..count).filter(|&rule| open[rule] == 0).collect();
    while let Some(rule) = next.pop() {
        is_regular[rule] = true;
        for &by in &named_by[rule] {
            open[by] -= 1;
            if open[by] == 0 {
                next.push(by);
            }
        }
    }
    is_regular
}

struct Planner<'a> {
    ebnf: &'a mut Ebnf,
    is_regular: Vec<bool>,
    /// Nodes that are no terminal, nor part of one; parts of theirs are not put together.
    split: HashSet<usize>,
    /// Nodes that were put together of a node's parts, and the characters of texts.
    made: HashMap<(usize, usize, usize), usize>,
}

/// What a round makes.
struct Round {
    plan: Plan,
    /// For each terminal, the node to split.
    owners: Vec<usize>,
    is_whole: HashMap<usize, bool>,
    next: VecDeque<usize>,
}

impl Planner<'_> {
    fn round(&mut self) -> (Plan, Vec<usize>) {
        let plan = Plan { rules: Vec::new(), lexemes: Vec::new() };
        let next = VecDeque::from([self.ebnf.root]);
        let mut round = Round { plan, owners: Vec::new(), is_whole: HashMap::new(), next };
        let mut met = HashSet::new();
        while let Some(rule) = round.next.pop_front() {
            if met.insert(rule) {
                let part = self.part(&mut round, self.ebnf.rules[rule].body);
                round.plan.rules.push((rule, part));
            }
        }
        (round.plan, round.owners)
    }

    /// True if a node may be one terminal.
    fn is_whole(&self, round: &mut Round, node: usize) -> bool {
        if let Some(&known) = round.is_whole.get(&node) {
            return known;
        }
        let is_whole = !self.split.contains(&node)
            && match &self.ebnf.nodes[node] {
                Node::Chars(_) | Node::Text(_) => true,
                &Node::Rule(rule) => {
                    self.is_regular[rule] && self.is_whole(round, self.ebnf.rules[rule].body)
                }
                Node::Sequence(parts) | Node::Choice(parts) => {
                    parts.iter().all(|&part| self.is_whole(round, part))
                }
                &Node::Repeat { of, .. } => self.is_whole(round, of),
            };
        round.is_whole.insert(node, is_whole);
        is_whole
    }

    fn part(&mut self, round: &mut Round, node: usize) -> Part {
        if self.is_whole(round, node) {
            return lexeme(round, node, node);
        }
        match self.ebnf.nodes[node].clone() {
            Node::Chars(_) => unreachable!("a character goes on in no other"),
            Node::Text(text) => {
                let chars = text.chars().enumerate();
                let parts = chars.map(|(at, c)| {
                    let made = self.made(node, at, at, Node::Chars(vec![(c, c)]));
                    lexeme(round, made, made)
                });
                Part::Sequence(parts.collect())
            }
            Node::Rule(rule) => {
                round.next.push_back(rule);
                Part::Rule(rule)
            }
            Node::Sequence(parts) => Part::Sequence(self.parts(round, node, &parts, Node::Sequence)),
            Node::Choice(parts) => {
                // Those that can be one terminal are; their order says nothing.
                let (whole, others): (Vec<_>, Vec<_>) =
                    parts.iter().copied().partition(|&part| self.is_whole(round, part));
                let mut all = self.parts(round, node, &whole, Node::Choice);
                all.extend(others.into_iter().map(|part| self.part(round, part)));
                Part::Choice(all)
            }
            Node::Repeat { of, least, most } => Part::Repeat(Box::new(self.part(round, of)), least, most),
        }
    }

    /// Neighbours that may be terminals are one, unless their node is split.
    fn parts(
        &mut self,
        round: &mut Round,
        node: usize,
        parts: &[usize],
        of: fn(Vec<usize>) -> Node,
    ) -> Vec<Part> {
        let (mut all, mut at) = (Vec::new(), 0);
        while at < parts.len() {
            let run = parts[at..].iter().take_while(|&&part| self.is_whole(round, part)).count();
            if run < 2 || self.split.contains(&node) {
                all.push(self.part(round, parts[at]));
                at += 1;
            } else {
                let made = self.made(node, at, run, of(parts[at..at + run].to_vec()));
                all.push(lexeme(round, made, node));
                at += run;
            }
        }
        all
    }

    fn made(&mut self, node: usize, from: usize, count: usize, made: Node) -> usize {
        let ebnf = &mut *self.ebnf;
        *self.made.entry((node, from, count)).or_insert_with(|| ebnf.add(made))
    }
}

fn lexeme(round: &mut Round, node: usize, owner: usize) -> Part {
    round.plan.lexemes.push(node);
    round.owners.push(owner);
    Part::Lexeme(round.plan.lexemes.len() - 1)
}

/// Levels that terminals are taken apart by.
const ROUNDS_MAX: usize = 64;

pub(super) const TOO_LARGE: &str =
    "it is too large to tell where its parts end: write it in Lark, with terminals";

//! Grammars in the EBNF of llama.cpp (GBNF) and xgrammar, `root ::= ..`, as Lark.
//!
//! There a grammar is over characters; Lark's lexer cuts the text into terminals first and takes the longest at each
//! place. So that both allow the same texts, what is regular becomes one terminal as a whole, and where one terminal
//! could run on into what follows another, it is taken apart, down to single characters if need be ([`lexemes`]).
//!
//! The notation is that of <https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md> and of xgrammar's
//! "EBNF Grammar". What reaches beyond text (tokens, dispatch on tags, temperatures, lookahead) is refused by name.

mod automaton;
mod lexemes;
mod parse;
mod write;

/// A grammar as it was written. Nodes refer to each other by their place.
#[derive(Debug)]
struct Ebnf {
    nodes: Vec<Node>,
    rules: Vec<Rule>,
    /// Where it starts.
    root: usize,
}

#[derive(Debug)]
struct Rule {
    name: String,
    body: usize,
}

#[derive(Clone, Debug, PartialEq)]
enum Node {
    /// One character of these ranges, which are in order and apart.
    Chars(Vec<(char, char)>),
    Text(String),
    Rule(usize),
    Sequence(Vec<usize>),
    Choice(Vec<usize>),
    Repeat {
        of: usize,
        least: u32,
        /// None: without end.
        most: Option<u32>,
    },
}

impl Ebnf {
    fn add(&mut self, node: Node) -> usize {
        self.nodes.push(node);
        self.nodes.len() - 1
    }

    /// Calls `with` for what a node consists of.
    fn parts(&self, node: usize, mut with: impl FnMut(usize)) {
        match &self.nodes[node] {
            Node::Chars(_) | Node::Text(_) | Node::Rule(_) => {}
            Node::Sequence(parts) | Node::Choice(parts) => parts.iter().for_each(|&part| with(part)),
            Node::Repeat { of, .. } => with(*of),
        }
    }

    /// True if a finite text follows a node, where that is known of rules.
    fn ends(&self, node: usize, rules: &[bool]) -> bool {
        match &self.nodes[node] {
            Node::Chars(_) | Node::Text(_) => true,
            Node::Rule(rule) => rules[*rule],
            Node::Sequence(parts) => parts.iter().all(|&part| self.ends(part, rules)),
            Node::Choice(parts) => parts.iter().any(|&part| self.ends(part, rules)),
            Node::Repeat { of, least, .. } => *least == 0 || self.ends(*of, rules),
        }
    }

    /// The rules that a node names.
    fn names(&self, node: usize, names: &mut Vec<usize>) {
        if let Node::Rule(rule) = self.nodes[node] {
            names.push(rule);
        }
        self.parts(node, |part| self.names(part, names));
    }
}

/// True if a grammar is written with `::=`: behind the name of a rule at the beginning of a line.
pub(crate) fn is_ebnf(text: &str) -> bool {
    text.match_indices("::=").any(|(at, _)| {
        let before = text[..at].trim_end();
        // The options of a rule.
        let before = match before.strip_suffix(']').and_then(|inner| inner.rfind('[')) {
            Some(bracket) => before[..bracket].trim_end(),
            None => before,
        };
        let name = before.len() - before.trim_end_matches(parse::is_of_name).len();
        let line = before[..before.len() - name].rsplit('\n').next().unwrap_or_default();
        name > 0 && line.trim().is_empty()
    })
}

/// The same as Lark, with `ending` behind all of it. Errors name the line.
pub(crate) fn to_lark(text: &str, ending: &str) -> Result<String, String> {
    let mut ebnf = parse::parse(text)?;
    if !ending.is_empty() {
        let parts = vec![ebnf.add(Node::Rule(ebnf.root)), ebnf.add(Node::Text(ending.to_owned()))];
        let body = ebnf.add(Node::Sequence(parts));
        ebnf.rules.push(Rule { name: String::new(), body });
        ebnf.root = ebnf.rules.len() - 1;
    }
    let plan = lexemes::plan(&mut ebnf)?;
    Ok(write::lark(&ebnf, &plan))
}

#[cfg(test)]
mod tests;

//! The tables of `docs/api.md`, for the tests of this folder and for those within the crate.

const PAGE: &str = include_str!("../../../../docs/api.md");

/// A field, as the page has it.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) name: &'static str,
    /// `acts`, `refused` or `n/a`.
    pub(crate) says: &'static str,
    /// JSON.
    pub(crate) example: &'static str,
}

/// The table under the heading of `POST path`.
pub(crate) fn rows(path: &str) -> Vec<Row> {
    let heading = format!("## `POST {path}`");
    let rows: Vec<_> = PAGE
        .lines()
        .skip_while(|line| !line.starts_with(&heading))
        .skip(1)
        .take_while(|line| !line.starts_with('#'))
        .filter(|line| line.starts_with("| `"))
        .map(|line| {
            let cells = line.trim_matches('|').split(" | ").map(|cell| cell.trim().trim_matches('`'));
            let [name, says, example, _] = cells.collect::<Vec<_>>()[..] else { panic!("{path}: {line}") };
            Row { name, says, example }
        })
        .collect();
    assert!(!rows.is_empty(), "docs/api.md has no table of {path}");
    rows
}

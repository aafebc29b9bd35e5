//! Rules of the house that a machine can check, one file at a time.

/// Lines of a Rust file; beyond this it is two files.
const LINES_MAX: usize = 600;
/// Columns, a little over what rustfmt aims at: it leaves long strings alone.
const COLUMNS_MAX: usize = 160;
/// Lines of a crate's opening essay.
const ESSAY_LINES_MAX: usize = 40;

/// One line for each broken rule.
pub(crate) fn check(name: &str, text: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    let tests = name.ends_with("tests.rs") || name.contains("/tests/");
    if name.ends_with(".rs") {
        let lines = text.lines().count();
        if lines > LINES_MAX {
            complaints.push(format!("{name}: {lines} lines; {LINES_MAX} are the end"));
        }
        if !tests && !text.starts_with("//!") {
            complaints.push(format!("{name}: does not say in its first line what it is for"));
        }
        let essay = text.lines().take_while(|l| l.starts_with("//!")).count();
        if name.ends_with("src/lib.rs") && !name.contains("atom-group") && essay > ESSAY_LINES_MAX {
            complaints.push(format!("{name}: an essay of {essay} lines; {ESSAY_LINES_MAX} are enough"));
        }
    }
    for (number, line) in text.lines().enumerate() {
        let complain = |what: &str| format!("{name}:{}: {what}", number + 1);
        if name.ends_with(".rs") && !tests && line.chars().count() > COLUMNS_MAX {
            complaints.push(complain("a line that nobody reads to its end"));
        }
        if line.trim_end() != line {
            complaints.push(complain("space at the end of the line"));
        }
        // Spelled apart, so that this file passes its own check.
        for (a, b) in [("#[ign", "ore]"), ("/wo", "rk/"), ("FIX", "ME"), ("TO", "DO:"), ("XX", "X:")] {
            if line.contains(&[a, b].concat()) {
                complaints.push(complain(&format!("{a}{b} has no place here")));
            }
        }
    }
    complaints
}

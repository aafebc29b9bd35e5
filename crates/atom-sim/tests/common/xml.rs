//! Whether a text is well-formed XML, as far as a writer of elements, values and text can break it.

/// The first fault, with its place.
pub(crate) fn check(text: &str) -> Result<(), String> {
    let (mut at, mut open, mut roots) = (0, Vec::<&str>::new(), 0);
    while at < text.len() {
        let rest = &text[at..];
        let fault =
            |what: &str| Err(format!("{what} at byte {at}: {}", rest.chars().take(60).collect::<String>()));
        if let Some(tag) = rest.strip_prefix("</") {
            let Some((name, _)) = tag.split_once('>') else { return fault("a tag without end") };
            if open.pop() != Some(name) {
                return fault("a tag that closes another");
            }
            at += name.len() + 3;
        } else if let Some(tag) = rest.strip_prefix('<') {
            let Some((name, length, closed)) = element(tag) else { return fault("a broken tag") };
            roots += usize::from(open.is_empty());
            if !closed {
                open.push(name);
            }
            at += length + 1;
        } else {
            let content = &rest[..rest.find('<').unwrap_or(rest.len())];
            if !is_text(content) || open.is_empty() && !content.trim().is_empty() {
                return fault("text that is not allowed");
            }
            at += content.len();
        }
    }
    if open.is_empty() && roots == 1 { Ok(()) } else { Err(format!("{roots} roots, left open: {open:?}")) }
}

/// Of what follows `<`: name, length up to and with `>`, whether it closes itself.
fn element(tag: &str) -> Option<(&str, usize, bool)> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == ':';
    let name = &tag[..tag.find(|c| !is_name(c))?];
    let mut rest = &tag[name.len()..];
    let mut names = Vec::new();
    while let Some(attribute) = rest.strip_prefix(' ') {
        let (key, value) = attribute.split_once("=\"")?;
        let (value, after) = value.split_once('"')?;
        let fine = !key.is_empty() && key.chars().all(is_name) && !names.contains(&key);
        if !fine || !is_text(value) || value.contains('<') {
            return None;
        }
        names.push(key);
        rest = after;
    }
    let closed = rest.starts_with("/>");
    let end = if closed { "/>" } else { ">" };
    let fine = !name.is_empty() && name.starts_with(|c: char| c.is_ascii_alphabetic());
    (fine && rest.starts_with(end)).then(|| (name, tag.len() - rest.len() + end.len(), closed))
}

fn is_text(text: &str) -> bool {
    let entity = |part: &str| ["amp;", "lt;", "gt;", "quot;"].iter().any(|entity| part.starts_with(entity));
    text.split('&').skip(1).all(entity)
        && !text.contains('>')
        && !text.contains(|c: char| c.is_control() && c != '\n')
}

#[test]
fn faults_are_found() {
    assert_eq!(check("<a b=\"1\" c=\"x&lt;\"><b/>text &amp; more\n</a>\n"), Ok(()));
    for broken in [
        "",
        "text",
        "<a>",
        "<a></b>",
        "<a/><b/>",
        "<a b=1/>",
        "<a b=\"1/>",
        "<a b=\"1\" b=\"2\"/>",
        "<a>1 < 2</a>",
        "<a>&nbsp;</a>",
        "<a>R&D</a>",
        "<a><b></a></b>",
        "<a/>text",
        "<a b=\"<\"/>",
        "<a\u{1}/>",
        "<a>\u{1}</a>",
    ] {
        assert!(check(broken).is_err(), "{broken:?}");
    }
}

use super::*;

/// A text as it is written down.
fn shown(text: &str) -> String {
    let keys = ApiKeys::new(["sk-secret"]).unwrap();
    let mut shown = text.to_owned();
    for secret in secrets(text, &keys).into_iter().rev() {
        shown.replace_range(secret, REDACTED);
    }
    shown
}

/// Pairs of a text and what is written of it; what is written stays as it is.
fn check(cases: &[(&str, &str)]) {
    for (text, expected) in cases {
        assert_eq!(shown(text), *expected, "of {text}");
        assert_eq!(shown(expected), *expected, "again");
    }
}

#[test]
fn keys_of_this_server_are_taken_out_within_words_too() {
    check(&[
        ("a sk-secret, bsk-secret.", "a [redacted], b[redacted]."),
        ("sk-secret-not", "[redacted]"),
        ("Bearer sk-secret", "Bearer [redacted]"),
    ]);
}

#[test]
fn bearer_tokens_shorter_than_8_bytes_were_written() {
    check(&[
        ("Bearer abcdefgh", "Bearer [redacted]"),
        ("use Bearer abc123 then", "use Bearer [redacted] then"),
        ("bearer X", "bearer [redacted]"),
        ("Bearer hunter", "Bearer [redacted]"),
        ("Bearer  abc1", "Bearer  [redacted]"),
        (r#"{"x": "Bearer hunter"}"#, r#"{"x": "Bearer [redacted]"}"#),
        (r#"{\"x\": \"Bearer a1\"}"#, r#"{\"x\": \"Bearer [redacted]\"}"#),
        ("Bearer Bearer abc1", "Bearer [redacted] [redacted]"),
        ("a Bearer 12345678 and a Bearer 12345678.", "a Bearer [redacted] and a Bearer [redacted]"),
        ("the bearer of news", "the bearer of news"),
        ("a Bearer token goes there", "a Bearer token goes there"),
        ("Bearer ", "Bearer "),
        ("Bearer é12345678", "Bearer é12345678"),
    ]);
}

#[test]
fn keys_that_stood_by_themselves_were_written() {
    let long = "a1b2c3d4e5f6g7h8i9j0";
    for shape in &SHAPES {
        let key = format!("{}{}", shape.begins, long.to_uppercase().repeat(2));
        check(&[
            (&key, REDACTED),
            (&format!("it is {key}, really"), "it is [redacted], really"),
            (&format!("é{key}é"), "é[redacted]é"),
            (&format!("x='{key}'"), "x='[redacted]'"),
            (&format!(r#"{{"text": "a\n{key}\n"}}"#), r#"{"text": "a\n[redacted]\n"}"#),
        ]);
        let within = format!("x{key}");
        assert_eq!(shown(&within), within, "a word goes on");
        let short = format!("{} is how they begin", shape.begins);
        assert_eq!(shown(&short), short);
    }
    check(&[
        ("sk-abcdefgh and sk-a1b2", "[redacted] and [redacted]"),
        ("AKIAIOSFODNN7EXAMPLE", REDACTED),
        ("hf_abcdefghijklmnopq", REDACTED),
        ("xoxb-1234-abcdefgh", REDACTED),
    ]);
    for word in
        ["sk-learn", "task-manager-12345", "sk-SK", "hf_hub_download", "hf_transfer", "AKIA", "eyJhbGci"]
    {
        assert_eq!(shown(word), word);
    }
}

#[test]
fn values_by_their_names_were_written_when_the_name_was_not_on_a_short_list() {
    let names =
        ["client_secret", "token", "passwd", "pwd", "authorization", "Password", "X-Api-Key", "accessToken"];
    let further =
        ["AWS_SECRET_ACCESS_KEY", "private-key", "spring.datasource.password", "refresh_token", "hfToken"];
    for name in names.into_iter().chain(further) {
        check(&[
            (&format!(r#"{{"{name}": "a\"b", "x": 1}}"#), &format!(r#"{{"{name}": "[redacted]", "x": 1}}"#)),
            (&format!(r#"{{"{name}":12,"x":1}}"#), &format!(r#"{{"{name}":[redacted],"x":1}}"#)),
            (&format!("{{'{name}': 'a b'}}"), &format!("{{'{name}': '[redacted]'}}")),
            (&format!("?a=b&{name}=c%20d&e=f"), &format!("?a=b&{name}=[redacted]&e=f")),
            (&format!("https://a/b?{name}=c"), &format!("https://a/b?{name}=[redacted]")),
            (&format!("{name}=c&d=e"), &format!("{name}=[redacted]&d=e")),
            (&format!("export {name}=\"c d\"\n"), &format!("export {name}=\"[redacted]\"\n")),
            (
                &format!(r#"{{"{name}": {{"a": ["b"]}}, "x": 1}}"#),
                &format!(r#"{{"{name}": [redacted], "x": 1}}"#),
            ),
            (&format!(r#"cut: {{"{name}": "half"#), &format!(r#"cut: {{"{name}": "[redacted]"#)),
        ]);
        for nothing in [format!(r#"{{"{name}": null}}"#), format!("{name}="), format!(r#"a "{name}": "#)] {
            assert_eq!(shown(&nothing), nothing);
        }
    }
}

#[test]
fn values_within_texts_within_texts_end_where_they_end() {
    let mut text = r#"{"password": "a\"b\\", "x": "y"}"#.to_owned();
    let mut expected = r#"{"password": "[redacted]", "x": "y"}"#.to_owned();
    for _ in 0..4 {
        assert_eq!(shown(&text), expected);
        for text in [&mut text, &mut expected] {
            *text = serde_json::to_string(&serde_json::json!({"text": *text})).unwrap();
        }
    }
}

#[test]
fn names_in_prose_and_headers() {
    check(&[
        ("Authorization: Digest a, b=c\nx", "Authorization: [redacted]\nx"),
        (r#"curl -H "authorization: Basic dTpw" -d x"#, r#"curl -H "authorization: [redacted]" -d x"#),
        ("x-api-key: abc\r\n", "x-api-key: [redacted]\r\n"),
        ("password: hunter2\nuser: me", "password: [redacted]\nuser: me"),
        ("aws_secret_access_key = a/b+c\n", "aws_secret_access_key = [redacted]\n"),
        ("'password' => 'x'", "'password' => '[redacted]'"),
        ("my password: 'tis\nnothing else's", "my password: '[redacted]\nnothing else's"),
    ]);
    for prose in [
        "token: a piece of a text",
        "let token = next();",
        "secret: never",
        "max_tokens=5",
        r#"{"tokens": [1], "token_type": "bearer", "is_secret": true}"#,
        "password::hash(x) == password",
        r#"a "password" and a "secret""#,
        "the password",
    ] {
        assert_eq!(shown(prose), prose);
    }
}

#[test]
fn logins_in_addresses_were_written() {
    check(&[
        ("https://user:pass@host/a", "https://[redacted]@host/a"),
        ("see <postgres://u:p@s#s?@h:5432/db>", "see <postgres://[redacted]@h:5432/db>"),
        (r#"{"url": "http://u:pé@h"}"#, r#"{"url": "http://[redacted]@h"}"#),
    ]);
    for address in ["https://user@host", "http://host:80/a@b:c", "ssh://git@h:22/x", "a://b:c d@e"] {
        assert_eq!(shown(address), address);
    }
}

#[test]
fn blocks_of_pem_were_written() {
    let block = "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc=\n-----END RSA PRIVATE KEY-----";
    check(&[
        (&format!("a\n{block}\nb"), "a\n[redacted]\nb"),
        (&format!("{block}{block}"), "[redacted][redacted]"),
        (&block.replace('\n', "\\n"), REDACTED),
        (&block[..50], REDACTED),
    ]);
    let no_block = "-----BEGIN is how it begins-----";
    assert_eq!(shown(no_block), no_block);
}

#[test]
fn a_megabyte_of_beginnings_is_read_once() {
    // If each looked to the end, these would be some 10^11 steps.
    for beginning in [
        "Bearer ",
        "bearer",
        "sk-",
        "eyJ",
        "x.",
        "password",
        "token=",
        "token:",
        "'token':",
        "\"token\":",
        "\"token\":[",
        "\"token\":null",
        "\"token\": ",
        "\\\"token\\\":\\\"",
        "password='",
        "password=\"",
        "password: ",
        "authorization:",
        "://",
        "password=[redacted]",
        "authorization:[redacted]",
        "'token':'[redacted]'",
        "://a:b",
        "a:b@",
        "-----BEGIN ",
        "-----BEGIN A-----",
        "-----END ",
        "\\",
        "=",
        ":",
        "\"",
        "_",
        " ",
    ] {
        let text = beginning.repeat((1 << 20) / beginning.len());
        let found = secrets(&text, &ApiKeys::default());
        assert!(
            found.is_sorted_by_key(|range| range.start) && found.iter().all(|range| range.end <= text.len())
        );
    }
}

#[test]
fn the_documentation_has_the_same_tables() {
    let documentation = include_str!("../../../../docs/hardening.md");
    for word in SHAPES.map(|shape| shape.begins).into_iter().chain(NAMES) {
        assert!(documentation.contains(&format!("`{word}`")), "no `{word}`");
    }
}

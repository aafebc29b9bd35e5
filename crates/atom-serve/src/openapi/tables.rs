//! The tables of `docs/api.md` have every field that is declared, and no other. What their rows say is tried over
//! a socket, by the tests beside `rows`.

use super::Takes;
use crate::declare::{self, Object};
use crate::routes;
use std::collections::BTreeSet;

#[path = "../../tests/http/rows.rs"]
mod rows;
use rows::Row;

#[test]
fn every_declared_field_has_a_row_and_every_row_a_declared_field() {
    let (mut faults, mut tables) = (Vec::new(), 0);
    for (_, path, operation) in routes::api().paths {
        let objects = match &operation.takes {
            Takes::Nothing | Takes::Name | Takes::Order => continue,
            Takes::Body(objects) => objects,
            Takes::Generation(object) => std::slice::from_ref(object),
        };
        tables += 1;
        faults.extend(compare(path, objects));
    }
    assert!(tables >= 9, "only {tables} paths take bodies");
    assert!(faults.is_empty(), "{faults:#?}");
}

/// What is wrong with the table of a path whose body is one of `objects`.
fn compare(path: &str, objects: &[&Object]) -> Vec<String> {
    // What is rendered is the body of the path beside.
    let rows = rows::rows(path.strip_suffix("/render").unwrap_or(path));
    let mut faults = Vec::new();
    let mut seen = BTreeSet::new();
    for row in &rows {
        let declared: Vec<_> = objects.iter().filter_map(|object| object.field(row.name)).collect();
        if !seen.insert(row.name) {
            faults.push(format!("{path}: '{}' has two rows", row.name));
        } else if declared.is_empty() {
            faults.push(format!("{path}: '{}' has a row and is not declared", row.name));
        } else if !declared.iter().any(|field| may_be(&field.takes, row)) {
            faults.push(format!("{path}: '{}' is not declared as {}", row.name, row.says));
        }
    }
    let declared: BTreeSet<_> =
        objects.iter().flat_map(|object| object.fields()).map(|field| field.name).collect();
    faults.extend(declared.difference(&seen).map(|name| format!("{path}: '{name}' has no row")));
    faults
}

/// Whether a field that takes this can be what its row says.
fn may_be(takes: &declare::Takes, row: &Row) -> bool {
    match takes {
        declare::Takes::Never(_) => row.says == "refused",
        declare::Takes::Unread(_) => row.says == "n/a",
        declare::Takes::Only(texts, _) => {
            let is_taken = texts.iter().any(|text| declare::only(text) == declare::only(row.example));
            row.says == if is_taken { "n/a" } else { "refused" }
        }
        _ => matches!(row.says, "acts" | "n/a" | "refused"),
    }
}

#[test]
fn a_field_without_a_row_and_a_row_without_a_field_are_found() {
    use declare::{field, idle, needed};
    const TOKENS: declare::Field = needed("tokens", declare::Takes::Map, "");
    const MORE: Object = Object {
        name: "More",
        groups: &[
            &[TOKENS, idle("model", declare::Takes::Never("no"))],
            &[field("new", declare::Takes::Flag, ""), idle("never", declare::Takes::Never("no"))],
        ],
    };
    const LESS: Object = Object { name: "Less", groups: &[&[TOKENS]] };
    let path = "/detokenize";
    let expected = ["'model' is not declared as acts", "'never' has no row", "'new' has no row"];
    assert_eq!(compare(path, &[&MORE]), expected.map(|fault| format!("{path}: {fault}")));
    assert_eq!(compare(path, &[&LESS]), [format!("{path}: 'model' has a row and is not declared")]);
}

//! The rules of the house that no compiler checks. The tables here are those of `ARCHITECTURE.md`; if the house must
//! change, both change in one commit.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// Which room may import which. Every room of `src/` has a line.
const MAY_IMPORT: &[(&str, &str)] = &[
    ("model", ""),
    ("runtime", "model"),
    ("pb", ""),
    ("config", "model"),
    ("telemetry", "config"),
    ("store", "model config runtime"),
    ("hold", "model runtime"),
    ("broker", "model config runtime store hold"),
    ("client", "model runtime pb"),
    ("api", "model config runtime pb broker"),
    ("app", "model runtime pb config telemetry store hold broker client api"),
    ("cli", "model config telemetry client store app"),
];

/// Crates that only some rooms may name.
const ONLY_IN: &[(&str, &str)] = &[
    ("tonic", "api client pb"),
    ("tonic_prost", "api client pb"),
    ("tonic_types", "api client pb"),
    ("tonic_health", "api client pb"),
    ("tonic_reflection", "api client pb"),
    ("prost", "api client pb"),
    ("prost_types", "api client pb"),
    ("kube", "operator"),
    ("memmap2", "store"),
];

/// Longest file in `src/`, lines.
const MAX_LINES: usize = 800;
/// Files that may be longer, each with its reason.
const LONG_FILES: &[(&str, &str)] = &[];

/// Files that are read as text by the rules for the whole repository.
const TEXT: &[&str] = &["rs", "md", "toml", "proto", "py", "js", "json", "sh", "txt", "yaml", "yml", ""];
/// What tools make.
const MADE: &[&str] = &["target", ".git", "node_modules", "__pycache__", ".venv", "data"];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// All files below `dir` with one of `extensions`, as (path from the root, text).
fn files(dir: &Path, extensions: &[&str]) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut todo = vec![dir.to_path_buf()];
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if MADE.contains(&name.as_str()) {
                continue;
            }
            if path.is_dir() {
                todo.push(path);
                continue;
            }
            let extension = path.extension().map(|e| e.to_string_lossy().into_owned()).unwrap_or_default();
            if !extensions.contains(&extension.as_str()) {
                continue;
            }
            if let Ok(text) = fs::read_to_string(&path) {
                let shown = path.strip_prefix(root()).unwrap().to_string_lossy().into_owned();
                found.push((shown, text));
            }
        }
    }
    found.sort();
    found
}

fn sources() -> Vec<(String, String)> {
    files(&root().join("src"), &["rs"])
}

/// The room that a file of `src/` is in; `None` for `lib.rs` and `main.rs`, which are the doors.
fn room_of(file: &str) -> Option<&str> {
    let inside = file.strip_prefix("src/")?;
    match inside.split_once('/') {
        Some((room, _)) => Some(room),
        None => inside.strip_suffix(".rs").filter(|&name| name != "lib" && name != "main"),
    }
}

/// What a file does outside its tests: no comments, nothing from the first `#[cfg(test)]` on (unit tests end
/// the file they test), nothing at all for a file of tests.
fn code(file: &str, text: &str) -> String {
    if file.ends_with("/tests.rs") || file.contains("/tests/") {
        return String::new();
    }
    let mut code = String::new();
    for line in text.lines() {
        if line.trim_start().starts_with("#[cfg(test)]") {
            break;
        }
        let line = match line.find("//") {
            Some(at) if !line[..at].ends_with(':') => &line[..at],
            _ => line,
        };
        code.push_str(line);
        code.push('\n');
    }
    code
}

/// The first path segments after each `crate::`, also those in braces.
fn imports(code: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        if code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '$') {
            continue;
        }
        let rest = &code[at + "crate::".len()..];
        if let Some(list) = rest.strip_prefix('{') {
            found.extend(heads_of_list(list));
        } else {
            found.insert(identifier(rest));
        }
    }
    found.remove("");
    found
}

fn identifier(text: &str) -> String {
    text.chars().take_while(|&c| c.is_alphanumeric() || c == '_').collect()
}

/// The identifiers that begin the items of a braced list; `list` begins behind the opening brace.
fn heads_of_list(list: &str) -> Vec<String> {
    let (mut depth, mut heads, mut item) = (0_usize, Vec::new(), String::new());
    for c in list.chars() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => heads.push(identifier(std::mem::take(&mut item).trim())),
            _ if depth == 0 => item.push(c),
            _ => {}
        }
    }
    heads.push(identifier(item.trim()));
    heads
}

fn complain(wrongs: &[String]) {
    assert!(wrongs.is_empty(), "\n{}\n", wrongs.join("\n"));
}

#[test]
fn rooms_import_only_what_the_table_allows() {
    let mut wrong = Vec::new();
    let rooms: BTreeSet<&str> = MAY_IMPORT.iter().map(|&(room, _)| room).collect();
    for (file, text) in sources() {
        let Some(room) = room_of(&file) else { continue };
        let Some(&(_, allowed)) = MAY_IMPORT.iter().find(|&&(name, _)| name == room) else {
            wrong.push(format!("{file}: `{room}` is a room without a line in MAY_IMPORT"));
            continue;
        };
        for target in imports(&code(&file, &text)) {
            let is_room = rooms.contains(target.as_str());
            if is_room && target != room && !allowed.split(' ').any(|name| name == target) {
                wrong.push(format!("{file}: {room} must not import {target}"));
            }
        }
    }
    complain(&wrong);
}

#[test]
fn crates_that_belong_to_one_room_stay_there() {
    let mut wrong = Vec::new();
    for (file, text) in sources() {
        let room = room_of(&file).unwrap_or("");
        let code = code(&file, &text);
        for &(name, rooms) in ONLY_IN {
            let used = [format!("{name}::"), format!("use {name};"), format!("{name}!")].iter().any(|path| {
                code.match_indices(path.as_str()).any(|(at, _)| {
                    !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':')
                })
            });
            if used && !rooms.split(' ').any(|allowed| allowed == room) {
                wrong.push(format!("{file}: `{name}` belongs to {rooms}"));
            }
        }
    }
    complain(&wrong);
}

#[test]
fn every_file_says_at_its_top_what_it_is_for() {
    let mut wrong = Vec::new();
    for (file, text) in sources() {
        let first = text.lines().find(|line| !line.trim().is_empty()).unwrap_or("");
        if !first.starts_with("//!") && !first.starts_with("#![doc") && !file.ends_with("/tests.rs") {
            wrong.push(format!("{file}: begins without a `//!` that says what it is for"));
        }
    }
    complain(&wrong);
}

#[test]
fn every_room_is_in_the_table_of_the_crate_and_of_the_tour() {
    let library = fs::read_to_string(root().join("src/lib.rs")).unwrap();
    let tour = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let mut wrong = Vec::new();
    for &(room, _) in MAY_IMPORT {
        if !library.contains(&format!("| [`{room}`] |")) {
            wrong.push(format!("src/lib.rs: no line for `{room}`"));
        }
        if !tour.contains(&format!("| `{room}` |")) {
            wrong.push(format!("ARCHITECTURE.md: no line for `{room}`"));
        }
    }
    complain(&wrong);
}

#[test]
fn no_file_is_too_long_to_be_read_in_one_go() {
    let mut wrong = Vec::new();
    for (file, text) in sources() {
        let lines = text.lines().count();
        if lines > MAX_LINES && !LONG_FILES.iter().any(|&(name, _)| name == file) {
            wrong.push(format!("{file}: {lines} lines, over {MAX_LINES}; divide it by what it does"));
        }
    }
    complain(&wrong);
}

#[test]
fn nothing_is_left_half_done_in_the_sources() {
    let marks = ["TODO", "FIXME", "XXX ", "XXX:", "todo!", "unimplemented!"];
    let mut wrong = Vec::new();
    for (file, text) in sources() {
        for (number, line) in text.lines().enumerate() {
            for mark in marks {
                if line.contains(mark) {
                    wrong.push(format!("{file}:{}: `{}`", number + 1, mark.trim()));
                }
            }
        }
    }
    complain(&wrong);
}

#[test]
fn no_text_names_the_place_where_it_was_written() {
    let places = [concat!("/wo", "rk/"), concat!(".lib", "rary")];
    let mut wrong = Vec::new();
    for (file, text) in files(&root(), TEXT) {
        for (number, line) in text.lines().enumerate() {
            if places.iter().any(|place| line.contains(place)) {
                wrong.push(format!("{file}:{}: {}", number + 1, line.trim()));
            }
        }
    }
    complain(&wrong);
}

#[test]
fn every_call_of_the_api_is_driven_by_a_test() {
    let tests: String = files(&root().join("tests"), &["rs"]).into_iter().map(|(_, text)| text).collect();
    let mut wrong = Vec::new();
    for (file, text) in files(&root().join("proto"), &["proto"]) {
        for line in text.lines() {
            let Some(rpc) = line.trim().strip_prefix("rpc ") else { continue };
            let name = identifier(rpc);
            let mut method = String::new();
            for c in name.chars() {
                if c.is_uppercase() && !method.is_empty() {
                    method.push('_');
                }
                method.extend(c.to_lowercase());
            }
            if !tests.contains(&format!(".{method}(")) {
                wrong.push(format!("{file}: nothing in tests calls {name}"));
            }
        }
    }
    complain(&wrong);
}

#[test]
fn every_reason_of_an_error_is_explained_in_the_readme() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let errors = fs::read_to_string(root().join("src/broker/error.rs")).unwrap();
    let list = errors.split("fn reason").nth(1).unwrap().split("pub fn").next().unwrap();
    let reasons: Vec<&str> = list.split('"').skip(1).step_by(2).collect();
    assert!(reasons.len() > 10, "the list is not where it was: {reasons:?}");
    let missing = reasons.iter().filter(|reason| !readme.contains(&format!("| `{reason}` |")));
    complain(&missing.map(|reason| format!("README.md: no line for `{reason}`")).collect::<Vec<_>>());
}

#[test]
fn imports_in_braces_are_seen() {
    let code = "use crate::{\n    model::{Name, QueueKey},\n    runtime::Clock, pb,\n};\nfn f() { crate::store::open() }";
    let seen: Vec<String> = imports(code).into_iter().collect();
    assert_eq!(seen, ["model", "pb", "runtime", "store"]);
}

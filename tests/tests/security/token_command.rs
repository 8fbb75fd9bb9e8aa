//! `kvctl token create` and the policy.

use kvpool_tests::daemon::path_of;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

/// The exit code and all words of `kvctl token create` for subject `a`.
fn create(directory: &Path, more: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(path_of("kvctl").unwrap())
        .args(["token", "create", "--subject", "a", "--dir"])
        .arg(directory)
        .args(more)
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].concat();
    (
        output.status.code(),
        String::from_utf8_lossy(&said).into_owned(),
    )
}

#[test]
fn a_token_without_a_life_and_an_issuer_without_a_name_are_refused() {
    let directory = TempDir::new().unwrap();
    for more in [
        ["--ttl", "0s"],
        ["--ttl", "900ms"],
        ["--issuer", ""],
        ["--audience", ""],
    ] {
        let all = [&["--role", "writer", "--in", "x"][..], &more].concat();
        let (code, said) = create(directory.path(), &all);
        assert_eq!(code, Some(2), "{more:?}: {said}");
        assert_eq!(
            std::fs::read_dir(directory.path()).unwrap().count(),
            0,
            "{more:?}"
        );
    }
}

#[test]
fn a_subject_with_a_rule_gets_no_second_one() {
    let directory = TempDir::new().unwrap();
    let read = |name: &str| std::fs::read_to_string(directory.path().join(name)).unwrap();
    let (code, said) = create(directory.path(), &["--role", "writer", "--in", "x"]);
    assert_eq!(code, Some(0), "{said}");
    let (policy, token) = (read("policy.toml"), read("a.token"));
    assert_eq!(policy.matches("[[rule]]").count(), 1, "{policy}");

    // Fewer rights: the first rule would still give them all.
    let fewer = ["--replace", "--role", "reader", "--in", "x"];
    let (code, said) = create(directory.path(), &fewer);
    assert_eq!(code, Some(2), "{said}");
    for part in ["policy.toml", "only adds rights", "without --role"] {
        assert!(said.contains(part), "{said}");
    }
    assert_eq!(
        (read("policy.toml"), read("a.token")),
        (policy.clone(), token.clone())
    );

    // The same rule again, as a job that renews tokens has it, and no rule.
    let same = [
        "--replace",
        "--role",
        "writer",
        "--in",
        "x",
        "--ttl",
        "2days",
    ];
    for more in [&same[..], &["--replace", "--ttl", "3days"]] {
        let before = read("a.token");
        let (code, said) = create(directory.path(), more);
        assert_eq!(code, Some(0), "{said}");
        assert_eq!(read("policy.toml"), policy);
        assert_ne!(read("a.token"), before);
    }
    // Words that are no role.
    let (code, said) = create(directory.path(), &["--replace", "--role", "king"]);
    assert_eq!(code, Some(2));
    assert!(
        said.contains("reader") && said.contains("operator"),
        "{said}"
    );
}

/// The ids of the keys that the pool would believe.
fn believed(directory: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(directory.join("jwks.json")).unwrap();
    let set: serde_json::Value = serde_json::from_str(&text).unwrap();
    let keys = set["keys"].as_array().unwrap();
    let ids = keys.iter().map(|key| key["kid"].as_str().unwrap());
    ids.map(str::to_owned).collect()
}

#[test]
fn a_key_is_rotated_and_forgotten_and_tokens_follow() {
    let directory = TempDir::new().unwrap();
    let path = directory.path();
    let run = |words: &[&str]| {
        let output = Command::new(path_of("kvctl").unwrap())
            .arg("token")
            .args(words)
            .arg("--dir")
            .arg(path)
            .output()
            .unwrap();
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        (output.status.code(), said)
    };
    let (code, said) = create(path, &["--role", "writer", "--in", "x"]);
    assert_eq!(code, Some(0), "{said}");
    let token = path.join("a.token");
    let token = token.to_str().unwrap();
    let first = believed(path);
    let (code, said) = run(&["rotate", "--wait", "10ms"]);
    assert_eq!(code, Some(0), "{said}");
    let both = believed(path);
    assert_eq!(both.len(), 2, "{both:?}");
    assert!(said.contains(&both[0]) && said.contains(&both[1]), "{said}");
    let (code, said) = run(&["inspect", token]);
    assert_eq!(code, Some(0), "a token of the key before is good: {said}");
    assert!(said.contains("verified; roles: writer in x"), "{said}");

    // The key that signs stays, and so does everything when the id is wrong.
    for (kid, why) in [(&*both[1], "rotate"), ("none", &*both[0])] {
        let (code, said) = run(&["forget", kid]);
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains(why), "{said}");
        assert_eq!(believed(path), both);
    }
    let (code, said) = run(&["forget", &first[0]]);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(believed(path), both[1..]);
    let (code, said) = run(&["inspect", token]);
    assert_ne!(code, Some(0), "{said}");
    assert!(said.contains("no key of the JWKS"), "{said}");
    let (code, said) = create(path, &["--replace"]);
    assert_eq!(code, Some(0), "{said}");
    let (code, said) = run(&["inspect", token]);
    assert_eq!(code, Some(0), "{said}");
}

use super::*;
use serde::Deserialize;

#[derive(Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
struct Config {
    listen: String,
    threads: u32,
    segments: Vec<String>,
    token: Option<String>,
    eviction: Eviction,
}

#[derive(Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
struct Eviction {
    high_watermark: f64,
    ratio: f64,
    policy: Policy,
}

#[derive(Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
enum Policy {
    #[default]
    Lru,
    Chain,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:1".into(),
            threads: 1,
            segments: vec!["1GiB".into()],
            token: None,
            eviction: Eviction::default(),
        }
    }
}

#[derive(Default, Serialize)]
struct Flags {
    #[serde(skip_serializing_if = "Option::is_none")]
    listen: Option<String>,
    threads: Option<u32>,
    segments: Vec<String>,
    eviction: EvictionFlags,
}

#[derive(Default, Serialize)]
struct EvictionFlags {
    ratio: Option<f64>,
}

fn file(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

fn load_with(
    file: Option<&Path>,
    vars: &[(&str, &str)],
    flags: &Flags,
) -> Result<Config, ConfigError> {
    let vars = vars
        .iter()
        .map(|(name, value)| ((*name).to_owned(), Ok((*value).to_owned())));
    load_from(file, "KVX_", vars, flags)
}

#[test]
fn a_flag_with_empty_text_is_refused_and_an_empty_variable_counts_as_not_set() {
    let name = |text: &str| Flags {
        listen: Some(text.into()),
        ..Flags::default()
    };
    let list = Flags {
        segments: vec!["1GiB".into(), String::new()],
        ..Flags::default()
    };
    for (flags, key) in [
        (name(""), "listen"),
        (name(" "), "listen"),
        (list, "segments"),
    ] {
        let said = load_with(None, &[], &flags).unwrap_err().to_string();
        let expected = format!(
            "invalid value for `{key}` in the command line: it is empty; leave the flag out for the default"
        );
        assert_eq!(said, expected);
    }
    let config = load_with(None, &[("KVX_LISTEN", "")], &Flags::default());
    assert_eq!(config.unwrap(), Config::default());
    // The output of --print-config has the settings whose default is empty.
    let printed = file("listen = ''\n");
    let config = load_with(Some(printed.path()), &[], &Flags::default());
    assert_eq!(config.unwrap().listen, "");
}

#[test]
fn each_layer_covers_the_one_below() {
    let toml =
        file("listen = 'file'\nthreads = 2\n[eviction]\nratio = 0.2\nhigh_watermark = 0.2\n");
    let vars = [("KVX_LISTEN", "env"), ("KVX_EVICTION__RATIO", "0.3")];
    let flags = Flags {
        listen: Some("flag".into()),
        eviction: EvictionFlags { ratio: Some(0.4) },
        ..Flags::default()
    };
    let none = Flags::default();

    assert_eq!(load_with(None, &[], &none).unwrap(), Config::default());

    let config = load_with(Some(toml.path()), &[], &none).unwrap();
    assert_eq!((config.listen.as_str(), config.threads), ("file", 2));
    assert_eq!(config.eviction.ratio, 0.2);

    let config = load_with(Some(toml.path()), &vars, &none).unwrap();
    assert_eq!((config.listen.as_str(), config.threads), ("env", 2));
    assert_eq!(config.eviction.ratio, 0.3);
    assert_eq!(config.eviction.high_watermark, 0.2);

    let config = load_with(Some(toml.path()), &vars, &flags).unwrap();
    assert_eq!((config.listen.as_str(), config.threads), ("flag", 2));
    assert_eq!(config.eviction.ratio, 0.4);
    assert_eq!(config.segments, ["1GiB"]);
}

#[test]
fn flags_that_were_not_given_cover_nothing() {
    let toml = file("threads = 7\nsegments = ['2GiB', '3GiB']\n");
    let config = load_with(Some(toml.path()), &[], &Flags::default()).unwrap();
    assert_eq!(config.threads, 7);
    assert_eq!(config.segments, ["2GiB", "3GiB"]);
}

#[test]
fn an_unknown_key_is_refused_with_its_place() {
    let toml = file("[eviction]\nhigh_water = 0.9\n");
    let error = load_with(Some(toml.path()), &[], &Flags::default()).unwrap_err();
    let ConfigError::UnknownField {
        key,
        origin,
        expected,
    } = &error
    else {
        panic!("{error}");
    };
    assert_eq!(key, "eviction.high_water");
    assert_eq!(*origin, toml.path().display().to_string());
    assert!(expected.contains("`high_watermark`"), "{expected}");

    let error = load_with(None, &[("KVX_THREDS", "1")], &Flags::default()).unwrap_err();
    assert!(
        matches!(&error, ConfigError::UnknownField { key, origin, .. }
            if key == "threds" && origin.ends_with("KVX_THREDS")),
        "{error}"
    );
}

#[test]
fn a_bad_value_is_refused_with_its_place() {
    let toml = file("threads = 'many'\n");
    let error = load_with(Some(toml.path()), &[], &Flags::default()).unwrap_err();
    assert!(
        matches!(&error, ConfigError::BadValue { key, origin, .. }
            if key == "threads" && *origin == toml.path().display().to_string()),
        "{error}"
    );

    let vars = [("KVX_EVICTION__POLICY", "fifo")];
    let error = load_with(None, &vars, &Flags::default()).unwrap_err();
    let ConfigError::BadValue {
        key,
        origin,
        reason,
    } = &error
    else {
        panic!("{error}");
    };
    assert_eq!(key, "eviction.policy");
    assert!(origin.ends_with("KVX_EVICTION__POLICY"), "{origin}");
    assert!(reason.contains("`fifo`") && reason.contains("`chain`"));
}

#[test]
fn files_that_cannot_be_read_or_parsed_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("no.toml");
    let error = load_with(Some(&missing), &[], &Flags::default()).unwrap_err();
    assert!(matches!(&error, ConfigError::Unreadable { path, .. } if *path == missing));
    assert!(error.to_string().contains("no.toml"));

    let toml = file("threads = \n");
    let error = load_with(Some(toml.path()), &[], &Flags::default()).unwrap_err();
    assert!(matches!(&error, ConfigError::BadToml { path, .. } if path == toml.path()));
    assert!(error.to_string().contains("line 1"), "{error}");
}

#[test]
fn variables_are_read_as_their_field_wants_them() {
    let vars = [
        ("KVX_LISTEN", "[::]:9000"),
        ("KVX_SEGMENTS", "[4GiB, 5GiB]"),
        ("KVX_TOKEN", "\"12345\""),
        ("KVX_EVICTION__POLICY", "chain"),
        ("KVX_THREADS", ""),
        ("OTHER_THREADS", "9"),
    ];
    let config = load_with(None, &vars, &Flags::default()).unwrap();
    assert_eq!(config.listen, "[::]:9000");
    assert_eq!(config.segments, ["4GiB", "5GiB"]);
    assert_eq!(config.token.as_deref(), Some("12345"));
    assert_eq!(config.eviction.policy, Policy::Chain);
    assert_eq!(config.threads, 1);

    // Digits alone stay text where the field holds text by default.
    let config = load_with(None, &[("KVX_LISTEN", "9000")], &Flags::default()).unwrap();
    assert_eq!(config.listen, "9000");
}

#[test]
fn a_list_is_given_as_plain_text_in_a_variable_or_a_flag() {
    let given: [(&str, &[&str]); 6] = [
        ("8GiB", &["8GiB"]),
        ("1073741824", &["1073741824"]),
        ("http://a:1,http://b:1", &["http://a:1", "http://b:1"]),
        ("etcd://a:1,b:1/pool", &["etcd://a:1,b:1/pool"]),
        (
            "etcd://a:1,b:1/x,http://c:1",
            &["etcd://a:1,b:1/x", "http://c:1"],
        ),
        ("\"1GiB, 2GiB\"", &["1GiB", "2GiB"]),
    ];
    for (text, items) in given {
        let config = load_with(None, &[("KVX_SEGMENTS", text)], &Flags::default()).unwrap();
        assert_eq!(config.segments, items, "{text}");
    }

    let flags = Flags {
        segments: vec!["8GiB".into(), "etcd://a:1,b:1/x,4GiB".into()],
        ..Flags::default()
    };
    let config = load_with(None, &[], &flags).unwrap();
    assert_eq!(config.segments, ["8GiB", "etcd://a:1,b:1/x", "4GiB"]);
}

#[test]
fn variables_that_kubernetes_makes_are_passed_over() {
    let vars = [
        ("KVX_SERVICE_HOST", "10.0.0.1"),
        ("KVX_SERVICE_PORT", "50051"),
        ("KVX_SERVICE_PORT_GRPC", "50051"),
        ("KVX_PORT", "tcp://10.0.0.1:50051"),
        ("KVX_PORT_50051_TCP_ADDR", "10.0.0.1"),
        ("KVX_HEADLESS_SERVICE_HOST", "None"),
    ];
    let config = load_with(None, &vars, &Flags::default()).unwrap();
    assert_eq!(config, Config::default());
}

#[test]
fn a_variable_that_is_not_utf8_is_refused_only_if_it_is_ours() {
    let vars = [("OTHER".to_owned(), Err(()))];
    load_from::<Config, _>(None, "KVX_", vars, &Flags::default()).unwrap();
    let vars = [("KVX_LISTEN".to_owned(), Err(()))];
    let error = load_from::<Config, _>(None, "KVX_", vars, &Flags::default()).unwrap_err();
    assert!(matches!(error, ConfigError::BadValue { key, .. } if key == "listen"));
}

#[test]
fn what_is_printed_loads_back() {
    let config = Config {
        token: Some("secret".into()),
        threads: 5,
        eviction: Eviction {
            ratio: 0.05,
            ..Eviction::default()
        },
        ..Config::default()
    };
    let toml = file(&to_toml(&config).unwrap());
    let loaded = load_with(Some(toml.path()), &[], &Flags::default()).unwrap();
    assert_eq!(loaded, config);
}

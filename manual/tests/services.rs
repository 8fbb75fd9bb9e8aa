//! The files of `deploy/systemd` fit the programs that they start.

use clap::Parser;
use kvpool_daemon::config::{self, ConfigError};
use kvpool_master::{Config as MasterConfig, Flags as MasterFlags};
use kvpool_store_node::{Config as NodeConfig, Flags as NodeFlags};
use std::path::{Path, PathBuf};
use std::time::Duration;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/systemd")
}

fn read(file: &str) -> String {
    std::fs::read_to_string(folder().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

fn master(file: &Path) -> Result<MasterConfig, ConfigError> {
    config::load(
        Some(file),
        "KVMASTER_",
        &MasterFlags::parse_from(["kvmaster"]),
    )
}

fn node(file: &Path) -> Result<NodeConfig, ConfigError> {
    config::load(
        Some(file),
        "KVSTORE_NODE_",
        &NodeFlags::parse_from(["kvstore-node"]),
    )
}

/// The values of a setting of a unit, in order.
fn settings(unit: &str, name: &str) -> Vec<String> {
    let lines = unit
        .lines()
        .filter_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    lines.map(str::to_owned).collect()
}

/// The configuration with its commented settings switched on.
fn with_examples(file: &str) -> tempfile::NamedTempFile {
    let is_setting = |line: &str| {
        let name = line.split_once(" = ").map(|(name, _)| name);
        name.is_some_and(|name| name.chars().all(|c| c.is_ascii_lowercase() || c == '_'))
    };
    let text = read(file);
    let mut examples = 0;
    let lines = text.lines().map(|line| match line.strip_prefix("# ") {
        Some(setting) if is_setting(setting) => {
            examples += 1;
            setting
        }
        _ => line,
    });
    let text = lines.collect::<Vec<_>>().join("\n");
    assert!(examples > 0, "{file} has no commented setting");
    let written = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(written.path(), text).unwrap();
    written
}

#[test]
fn the_configuration_files_load_and_so_do_their_commented_settings() {
    master(&folder().join("kvmaster.toml"))
        .unwrap()
        .validate()
        .unwrap();
    node(&folder().join("kvstore-node.toml"))
        .unwrap()
        .validate()
        .unwrap();
    let all = master(with_examples("kvmaster.toml").path()).unwrap();
    all.validate().unwrap();
    assert_eq!(all.etcd.len(), 3);
    let all = node(with_examples("kvstore-node.toml").path()).unwrap();
    all.validate().unwrap();
    assert_eq!(all.ssd.len(), 1);
}

#[test]
fn each_variable_of_the_environment_files_is_a_setting() {
    for (file, prefix) in [
        ("kvmaster.env", "KVMASTER_"),
        ("kvstore-node.env", "KVSTORE_NODE_"),
    ] {
        let text = read(file);
        let lines = text.lines().map(|line| line.trim_start_matches("# "));
        let names = lines.filter_map(|line| line.strip_prefix(prefix)?.split_once('='));
        let mut seen = 0;
        for (name, value) in names {
            let toml = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(
                toml.path(),
                format!("{} = \"{value}\"", name.to_lowercase()),
            )
            .unwrap();
            let unknown = match file {
                "kvmaster.env" => master(toml.path()).err(),
                _ => node(toml.path()).err(),
            };
            // A list is written otherwise in a file: only the name is judged.
            let unknown = matches!(unknown, Some(ConfigError::UnknownField { .. }));
            assert!(!unknown, "{file}: {name}");
            seen += 1;
        }
        assert!(seen >= 2, "{file}: {seen} variables");
    }
}

#[test]
fn the_units_start_the_programs_with_flags_that_they_take() {
    let command = |unit: &str| {
        let lines = settings(&read(unit), "ExecStart");
        assert_eq!(lines.len(), 1, "{unit}");
        lines[0]
            .split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let line = command("kvmaster.service");
    assert_eq!(line[0], "/usr/local/bin/kvmaster");
    let flags = MasterFlags::try_parse_from(line).unwrap();
    assert_eq!(flags.config, Some("/etc/kvpool/kvmaster.toml".into()));
    let line = command("kvstore-node.service");
    assert_eq!(line[0], "/usr/local/bin/kvstore-node");
    let flags = NodeFlags::try_parse_from(line).unwrap();
    assert_eq!(flags.config, Some("/etc/kvpool/kvstore-node.toml".into()));
}

#[test]
fn the_units_give_the_directories_that_the_configuration_uses() {
    let config = master(&folder().join("kvmaster.toml")).unwrap();
    let given = settings(&read("kvmaster.service"), "StateDirectory");
    assert_eq!(config.data_dir, Path::new("/var/lib").join(&given[0]));
    let unit = read("kvstore-node.service");
    let config = node(with_examples("kvstore-node.toml").path()).unwrap();
    let given = Path::new("/run").join(&settings(&unit, "RuntimeDirectory")[0]);
    assert_eq!(config.shm_path.parent(), Some(given.as_path()));
    let given = format!("path=/var/lib/{}/", settings(&unit, "StateDirectory")[0]);
    assert!(config.ssd[0].starts_with(&given), "{:?}", config.ssd);
}

#[test]
fn systemd_waits_longer_than_a_store_node_drains() {
    let config = node(&folder().join("kvstore-node.toml")).unwrap();
    let stop = settings(&read("kvstore-node.service"), "TimeoutStopSec");
    let seconds = stop[0].trim_end_matches('s').parse().unwrap();
    let drain = config.drain_timeout + config.ssd_drain_timeout;
    assert!(
        Duration::from_secs(seconds) >= drain + Duration::from_secs(30),
        "{stop:?} for {drain:?}"
    );
}

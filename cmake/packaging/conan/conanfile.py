"""Conan 2 recipe of the checkout that it lies in: conan create cmake/packaging/conan"""

import os
import re

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.files import copy, load
from conan.tools.layout import basic_layout


class HeddleConan(ConanFile):
    name = "heddle"
    description = "CPU kernels of a long-context mixture-of-experts RL trainer"
    license = "Apache-2.0"
    topics = ("reinforcement-learning", "mixture-of-experts", "kernels", "header-only")
    package_type = "header-library"
    settings = "os", "arch", "compiler", "build_type"
    no_copy_source = True

    @property
    def _checkout(self):
        return os.path.abspath(os.path.join(self.recipe_folder, "..", "..", ".."))

    def set_version(self):
        text = load(self, os.path.join(self._checkout, "CMakeLists.txt"))
        self.version = re.search(r"project\(heddle VERSION ([0-9.]+)", text).group(1)

    def export_sources(self):
        for pattern in ("LICENSE", "include/*"):
            copy(self, pattern, src=self._checkout, dst=self.export_sources_folder)

    def layout(self):
        basic_layout(self)

    def requirements(self):
        self.requires("eigen/[>=3.4 <4]", transitive_headers=True)
        self.requires("onetbb/[>=2021.8 <2023]", transitive_headers=True, transitive_libs=True)

    def package_id(self):
        self.info.clear()

    def validate(self):
        check_min_cppstd(self, 20)

    def package(self):
        licenses = os.path.join(self.package_folder, "licenses")
        copy(self, "LICENSE", src=self.source_folder, dst=licenses)
        # Without the mesh on MPI ranks: that needs the MPI of the machine that it runs on.
        for pattern in ("*.hpp", "*.inl"):
            copy(
                self,
                pattern,
                src=os.path.join(self.source_folder, "include"),
                dst=os.path.join(self.package_folder, "include"),
                excludes="*/mpi_*",
            )

    def package_info(self):
        self.cpp_info.bindirs = []
        self.cpp_info.libdirs = []
        self.cpp_info.set_property("cmake_file_name", "heddle")
        self.cpp_info.set_property("cmake_target_name", "heddle::heddle")
        self.cpp_info.set_property("pkg_config_name", "heddle")
        self.cpp_info.requires = ["eigen::eigen", "onetbb::libtbb"]
